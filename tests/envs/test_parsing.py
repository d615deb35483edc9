"""Text to value, by table: what is accepted, and what the refusal says."""

import pytest

from fleetrun.envs.contract import Mode, Role
from fleetrun.envs.settings import parsing
from fleetrun.envs.settings.parsing import InvalidValue, closest, written_follow

GOOD = [
    (parsing.count, "1", 1),
    (parsing.count, "4096", 4096),
    (parsing.whole(0), "0", 0),
    (parsing.whole(-1, 1), "-1", -1),
    (parsing.count_or_word("auto", "gpu", "cpu"), "AUTO", "auto"),
    (parsing.count_or_word("auto", "gpu", "cpu"), "8", 8),
    (parsing.run_mode, "ps", Mode.PS),
    (parsing.run_mode, "PS_HETER", Mode.PS_HETER),
    (parsing.choice("node", "process"), "Node", "node"),
    (parsing.boolean, "True", True),
    (parsing.boolean, "off", False),
    (parsing.seconds, "10", 10.0),
    (parsing.seconds, "1.5", 1.5),
    (parsing.seconds, ".5s", 0.5),
    (parsing.seconds, "5m", 300.0),
    (parsing.seconds, "2h", 7200.0),
    (parsing.size, "4096", 4096),
    (parsing.size, "100M", 100 * 1024**2),
    (parsing.size, "1GiB", 1024**3),
    (parsing.size, "500MB", 500 * 1000**2),
    (parsing.size, "1.5m", 1536 * 1024),
    (parsing.job_id, "run-1.a_b", "run-1.a_b"),
    (parsing.job_id, "训练", "训练"),
    (parsing.shell_words, "echo 'a b'", "echo 'a b'"),
    (parsing.device_list, "0,1", ("0", "1")),
    (parsing.device_list, "3, 01", ("3", "1")),
    (parsing.device_list, "GPU-8f1e-22,MIG-aa/1/0", ("GPU-8f1e-22", "MIG-aa/1/0")),
    (parsing.stage_counts, "2", (2,)),
    (parsing.stage_counts, "1;2", (1, 2)),
    (parsing.stage_devices, "gpu;CPU", ("gpu", "cpu")),
    (parsing.follow, "none", ()),
    (parsing.follow, "trainer", ((Role.TRAINER, None),)),
    (parsing.follow, "worker:2,0,2", ((Role.TRAINER, (0, 2)),)),
    (parsing.follow, "trainer:0+server", ((Role.TRAINER, (0,)), (Role.SERVER, None))),
    (parsing.follow, "all", tuple((role, None) for role in Role)),
    (parsing.port, "65535", 65535),
    (parsing.host, "localhost", "localhost"),
    (parsing.host, "node_1.example-2.org", "node_1.example-2.org"),
    (parsing.host, "[::1]", "::1"),
    (parsing.host, "fe80::2", "fe80::2"),
    (parsing.host_list, "10.0.0.1, 10.0.0.11", ("10.0.0.1", "10.0.0.11")),
    (parsing.endpoint_list, "", ()),
    (parsing.endpoint_list, "a:1, b:02", ("a:1", "b:2")),
    (parsing.endpoint_list, "[::1]:6170", ("[::1]:6170",)),
    (parsing.trainer_list, "127.0.0.1,127.0.0.1", ("127.0.0.1", "127.0.0.1")),
    (parsing.trainer_list, "a:1,b:1", ("a:1", "b:1")),
    (parsing.stage_endpoints, "a:1;b:1,b:2", (("a:1",), ("b:1", "b:2"))),
    (parsing.port_range, "35100:64000", (35100, 64000)),
    (parsing.port_range, "7:7", (7, 7)),
    (parsing.node_range, "1", (1, 1)),
    (parsing.node_range, "2:4", (2, 4)),
    (parsing.rendezvous_address, "10.0.0.1:8090", "10.0.0.1:8090"),
    (parsing.rendezvous_address, "http://host:8090", "host:8090"),
    (parsing.rendezvous_address, "etcd://etcd:2379", "etcd://etcd:2379"),
    (parsing.rendezvous_address, "etcd://a:1,b:1", "etcd://a:1,b:1"),
    (parsing.rendezvous_address, "a,b:7, [::1]", "a:6768,b:7,[::1]:6768"),
    (parsing.rendezvous_address, "embedded:3", "embedded:3"),
]


@pytest.mark.parametrize(("parse", "text", "value"), GOOD)
def test_value(parse, text, value):
    assert parse(text) == value


BAD = [
    (parsing.count, "0", "from 1 to 4096"),
    (parsing.count, "-1", "from 1 to 4096"),
    (parsing.count, "abc", "from 1 to 4096"),
    (parsing.count, "", "from 1 to 4096"),
    (parsing.count, "100000", "from 1 to 4096"),
    (parsing.count, "1e9", "from 1 to 4096"),
    (parsing.count, "9" * 5000, "from 1 to 4096"),
    (parsing.count, "\N{FULLWIDTH DIGIT ONE}", "from 1 to 4096"),
    (parsing.whole(0), "-3", "of at least 0"),
    (parsing.count_or_word("auto", "gpu", "cpu"), "tpu", "from 1 to 4096, or auto, gpu or cpu"),
    (parsing.run_mode, "foo", "collective, ps, ps-heter or rpc"),
    (parsing.boolean, "maybe", "true or false"),
    *((parsing.seconds, text, "longer than 0") for text in ("0", "-1", "inf", "nan", "1e3", "ten", "", "5w")),
    (parsing.size, "1X", "such as 100M"),
    (parsing.size, "-1", "such as 100M"),
    (parsing.size, "", "such as 100M"),
    (parsing.size, "100", "at least 4096"),
    (parsing.nonempty, "", "not be empty"),
    *((parsing.job_id, text, "a name of letters") for text in ("a/b", "..", ".a", "a b", "", "x" * 200)),
    (parsing.shell_words, "echo 'a", "no closing quotation"),
    (parsing.shell_words, " ", "a command line"),
    *((parsing.device_list, text, "device numbers") for text in ("a", "", "0,,1", "-1", "0;1", "0-3")),
    (parsing.device_list, "0,1,0", "0 is listed twice"),
    (parsing.stage_counts, "1;x", "joined by ';'"),
    (parsing.stage_devices, "tpu", "cpu, gpu, xpu or npu"),
    (parsing.follow, "rank0", "all, none, or roles"),
    (parsing.follow, "", "all, none, or roles"),
    (parsing.follow, "trainer:", "process numbers"),
    (parsing.follow, "trainer:0,ps", "with '+'"),
    (parsing.port, "0", "from 1 to 65535"),
    (parsing.port, "65536", "from 1 to 65535"),
    *(
        (parsing.host, text, "a host name or an IP address")
        for text in ("", "a:1", "10.0.0", "10.0.0.256", "a b")
    ),
    (parsing.host_list, "a,,b", "each entry must be"),
    (parsing.host_list, "a,b,a", "a is listed twice"),
    *((parsing.endpoint_list, text, "host:port") for text in ("a", "a:", ":1", "::1:80", "[a]:80", "a:1,b")),
    (parsing.endpoint_list, "a:0", "from 1 to 65535"),
    (parsing.endpoint_list, "a:70000", "from 1 to 65535"),
    (parsing.endpoint_list, "a:1,a:1", "a:1 is listed twice"),
    (parsing.trainer_list, "a:1,b", "each entry must be host:port"),
    (parsing.stage_endpoints, "a:1;", "endpoint"),
    (parsing.stage_endpoints, "a:1;a:1", "a:1 is listed twice"),
    (parsing.port_range, "64000:35100", "64000"),
    *((parsing.port_range, text, "LOW:HIGH") for text in ("1", "0:5", "1:70000", "a:b", "")),
    (parsing.node_range, "2:1", "MIN:MAX"),
    *((parsing.node_range, text, "N or MIN:MAX") for text in ("a:b", "", "0", "1:", ":2", "1:2:3")),
    *(
        (parsing.rendezvous_address, text, "host:port")
        for text in ("", "a", "etcd://", "etcd://a", "tcp://a:1", "a,b,")
    ),
    *((parsing.rendezvous_address, text, "3, 5 or 7 nodes") for text in ("a,b", "embedded:2", "embedded:")),
    (parsing.rendezvous_address, "a,b,a", "listed twice"),
]


@pytest.mark.parametrize(("parse", "text", "requirement"), BAD)
def test_refusal_says_what_the_value_must_be(parse, text, requirement):
    with pytest.raises(InvalidValue) as caught:
        parse(text)
    assert requirement in str(caught.value)


def test_a_wrong_word_comes_with_the_one_that_was_meant():
    with pytest.raises(InvalidValue) as caught:
        parsing.run_mode("colective")
    assert caught.value.meant[0] == "collective"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("nproc", "nproc_per_node"),  # begun and not finished
        ("server_nun", "server_num"),  # a typing error
        ("zzz", None),
    ],
)
def test_closest(word, expected):
    found = closest(word, ["server_num", "servers", "nproc_per_node"])
    assert (found[0] if found else None) == expected


@pytest.mark.parametrize("text", ["all", "none", "trainer:0", "trainer:0,2+ps", "heter", "coordinator:1"])
def test_follow_is_written_as_it_is_read(text):
    assert written_follow(parsing.follow(text)) == text


def test_trainers_without_ports_are_numbered():
    assert parsing.with_ports(("a", "a", "b"), 6171) == ("a:6171", "a:6172", "b:6173")
    assert parsing.with_ports(("a:1", "b:2"), 6171) == ("a:1", "b:2")
