"""Text to value, by table: what is accepted, and what the refusal says."""

import pytest

from fleetrun.envs import addresses, values
from fleetrun.envs.contract import Mode, Role
from fleetrun.envs.values import BadValue, closest, written_follow

GOOD = [
    (values.count, "1", 1),
    (values.count, "4096", 4096),
    (values.whole(0), "0", 0),
    (values.whole(-1, 1), "-1", -1),
    (values.count_or_word("auto", "gpu", "cpu"), "AUTO", "auto"),
    (values.count_or_word("auto", "gpu", "cpu"), "8", 8),
    (values.run_mode, "ps", Mode.PS),
    (values.run_mode, "PS_HETER", Mode.PS_HETER),
    (values.choice("node", "process"), "Node", "node"),
    (values.boolean, "True", True),
    (values.boolean, "off", False),
    (values.seconds, "10", 10.0),
    (values.seconds, "1.5", 1.5),
    (values.seconds, ".5s", 0.5),
    (values.seconds, "5m", 300.0),
    (values.seconds, "2h", 7200.0),
    (values.size, "4096", 4096),
    (values.size, "100M", 100 * 1024**2),
    (values.size, "1GiB", 1024**3),
    (values.size, "500MB", 500 * 1000**2),
    (values.size, "1.5m", 1536 * 1024),
    (values.job_id, "run-1.a_b", "run-1.a_b"),
    (values.job_id, "训练", "训练"),
    (values.shell_words, "echo 'a b'", "echo 'a b'"),
    (values.device_list, "0,1", ("0", "1")),
    (values.device_list, "3, 01", ("3", "1")),
    (values.device_list, "GPU-8f1e-22,MIG-aa/1/0", ("GPU-8f1e-22", "MIG-aa/1/0")),
    (values.stage_counts, "2", (2,)),
    (values.stage_counts, "1;2", (1, 2)),
    (values.stage_devices, "gpu;CPU", ("gpu", "cpu")),
    (values.follow, "none", ()),
    (values.follow, "trainer", ((Role.TRAINER, None),)),
    (values.follow, "worker:2,0,2", ((Role.TRAINER, (0, 2)),)),
    (values.follow, "trainer:0+server", ((Role.TRAINER, (0,)), (Role.SERVER, None))),
    (values.follow, "all", tuple((role, None) for role in Role)),
    (addresses.port, "65535", 65535),
    (addresses.host, "localhost", "localhost"),
    (addresses.host, "node_1.example-2.org", "node_1.example-2.org"),
    (addresses.host, "[::1]", "::1"),
    (addresses.host, "fe80::2", "fe80::2"),
    (addresses.host_list, "10.0.0.1, 10.0.0.11", ("10.0.0.1", "10.0.0.11")),
    (addresses.endpoint_list, "", ()),
    (addresses.endpoint_list, "a:1, b:02", ("a:1", "b:2")),
    (addresses.endpoint_list, "[::1]:6170", ("[::1]:6170",)),
    (addresses.trainer_list, "127.0.0.1,127.0.0.1", ("127.0.0.1", "127.0.0.1")),
    (addresses.trainer_list, "a:1,b:1", ("a:1", "b:1")),
    (addresses.stage_endpoints, "a:1;b:1,b:2", (("a:1",), ("b:1", "b:2"))),
    (addresses.port_range, "35100:64000", (35100, 64000)),
    (addresses.port_range, "7:7", (7, 7)),
    (addresses.node_range, "1", (1, 1)),
    (addresses.node_range, "2:4", (2, 4)),
    (addresses.meeting_point, "10.0.0.1:8090", "10.0.0.1:8090"),
    (addresses.meeting_point, "http://host:8090", "host:8090"),
    (addresses.meeting_point, "etcd://etcd:2379", "etcd://etcd:2379"),
    (addresses.meeting_point, "etcd://a:1,b:1", "etcd://a:1,b:1"),
]


@pytest.mark.parametrize(("parse", "text", "value"), GOOD)
def test_value(parse, text, value):
    assert parse(text) == value


BAD = [
    (values.count, "0", "from 1 to 4096"),
    (values.count, "-1", "from 1 to 4096"),
    (values.count, "abc", "from 1 to 4096"),
    (values.count, "", "from 1 to 4096"),
    (values.count, "100000", "from 1 to 4096"),
    (values.count, "1e9", "from 1 to 4096"),
    (values.count, "9" * 5000, "from 1 to 4096"),
    (values.count, "\N{FULLWIDTH DIGIT ONE}", "from 1 to 4096"),
    (values.whole(0), "-3", "of at least 0"),
    (values.count_or_word("auto", "gpu", "cpu"), "tpu", "from 1 to 4096, or auto, gpu or cpu"),
    (values.run_mode, "foo", "collective, ps, ps-heter or rpc"),
    (values.boolean, "maybe", "true or false"),
    *((values.seconds, text, "longer than 0") for text in ("0", "-1", "inf", "nan", "1e3", "ten", "", "5d")),
    (values.size, "1X", "such as 100M"),
    (values.size, "-1", "such as 100M"),
    (values.size, "", "such as 100M"),
    (values.size, "100", "at least 4096"),
    (values.nonempty, "", "not be empty"),
    *((values.job_id, text, "a name of letters") for text in ("a/b", "..", ".a", "a b", "", "x" * 200)),
    (values.shell_words, "echo 'a", "no closing quotation"),
    (values.shell_words, " ", "a command line"),
    *((values.device_list, text, "device numbers") for text in ("a", "", "0,,1", "-1", "0;1", "0-3")),
    (values.device_list, "0,1,0", "names 0 twice"),
    (values.stage_counts, "1;x", "joined by ';'"),
    (values.stage_devices, "tpu", "cpu, gpu, xpu or npu"),
    (values.follow, "rank0", "all, none, or roles"),
    (values.follow, "", "all, none, or roles"),
    (values.follow, "trainer:", "process numbers"),
    (values.follow, "trainer:0,ps", "with '+'"),
    (addresses.port, "0", "from 1 to 65535"),
    (addresses.port, "65536", "from 1 to 65535"),
    *(
        (addresses.host, text, "a host name or an IP address")
        for text in ("", "a:1", "10.0.0", "10.0.0.256", "a b")
    ),
    (addresses.host_list, "a,,b", "each entry must be"),
    (addresses.host_list, "a,b,a", "names a twice"),
    *(
        (addresses.endpoint_list, text, "host:port")
        for text in ("a", "a:", ":1", "::1:80", "[a]:80", "a:1,b")
    ),
    (addresses.endpoint_list, "a:0", "from 1 to 65535"),
    (addresses.endpoint_list, "a:70000", "from 1 to 65535"),
    (addresses.endpoint_list, "a:1,a:1", "names a:1 twice"),
    (addresses.trainer_list, "a:1,b", "each entry must be host:port"),
    (addresses.stage_endpoints, "a:1;", "a stage without an endpoint"),
    (addresses.stage_endpoints, "a:1;a:1", "names a:1 twice"),
    (addresses.port_range, "64000:35100", "64000 is above 35100"),
    *((addresses.port_range, text, "LOW:HIGH") for text in ("1", "0:5", "1:70000", "a:b", "")),
    (addresses.node_range, "2:1", "2 is above 1"),
    *((addresses.node_range, text, "N or MIN:MAX") for text in ("a:b", "", "0", "1:", ":2", "1:2:3")),
    *((addresses.meeting_point, text, "host:port") for text in ("", "a", "etcd://", "etcd://a", "tcp://a:1")),
]


@pytest.mark.parametrize(("parse", "text", "requirement"), BAD)
def test_refusal_says_what_the_value_must_be(parse, text, requirement):
    with pytest.raises(BadValue) as caught:
        parse(text)
    assert requirement in str(caught.value)


def test_a_wrong_word_comes_with_the_one_that_was_meant():
    with pytest.raises(BadValue) as caught:
        values.run_mode("colective")
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
    assert written_follow(values.follow(text)) == text


def test_trainers_without_ports_are_numbered():
    assert addresses.with_ports(("a", "a", "b"), 6171) == ("a:6171", "a:6172", "b:6173")
    assert addresses.with_ports(("a:1", "b:2"), 6171) == ("a:1", "b:2")
