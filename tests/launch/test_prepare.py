"""Checks of this machine before a launch: the program, and its place among the machines of the job."""

import os
import tempfile
from pathlib import Path

import pytest

from fleetrun.envs.settings.command_line import read
from fleetrun.envs.settings.resolve import resolve
from fleetrun.errors import ScriptNotExecutableError, ScriptNotFoundError, UsageError
from fleetrun.host.network import addresses, source_address
from fleetrun.launcher import prepare
from fleetrun.launcher.prepare import locate
from tests.support.isolated import isolated

# ---- Whether a script can be started, before anything is.


@pytest.fixture
def here(tmp_path):
    """The current directory, for modules and short names."""
    before = os.getcwd()  # noqa: PTH109
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


def test_a_python_script(here):
    (here / "train.py").touch()
    prepare.check_python_script("train.py")


def test_a_python_script_that_is_not_there(here):
    (here / "train.py").touch()
    with pytest.raises(ScriptNotFoundError, match=r"the script trian\.py does not exist") as caught:
        prepare.check_python_script("trian.py")
    assert (caught.value.exit_code, caught.value.hint) == (127, "Did you mean train.py?")


def test_nothing_like_it_is_there(here):
    with pytest.raises(ScriptNotFoundError) as caught:
        prepare.check_python_script("no/such/train.py")
    assert caught.value.hint is None


def test_a_directory(here):
    (here / "train.py").mkdir()
    for check in (prepare.check_python_script, lambda name: prepare.check_executable(f"./{name}", "")):
        with pytest.raises(ScriptNotExecutableError, match="is a directory") as caught:
            check("train.py")
        assert caught.value.exit_code == 126


def a_script_that_may_not_be_read():
    if os.getuid() == 0:  # who may read everything
        os.setuid(65534)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.touch(mode=0o000)
        with pytest.raises(ScriptNotExecutableError, match="cannot be read: permission denied"):
            prepare.check_python_script(str(script))


@pytest.mark.slow
def test_a_script_that_may_not_be_read():
    isolated(a_script_that_may_not_be_read)


@pytest.mark.parametrize(
    "module", ["json", "json.tool", "this", "zipimport", "trainers.examples.mnist", "mine", "folder"]
)
def test_modules(here, module):
    (here / "mine.py").touch()
    (here / "folder").mkdir()
    prepare.check_module(module)


@pytest.mark.parametrize("module", ["no_such_module_anywhere", "no_such.json"])
def test_a_module_that_is_not_there(here, module):
    with pytest.raises(ScriptNotFoundError, match=r"the module no_such\w* does not exist") as caught:
        prepare.check_module(module)
    assert caught.value.exit_code == 127


@pytest.mark.parametrize("module", ["train/x", "./train", "a-b", "", ".x", "__main__"])
def test_what_is_no_name_of_a_module(here, module):
    with pytest.raises(ScriptNotFoundError, match="not the name of a module"):
        prepare.check_module(module)


def test_a_module_that_an_editable_install_provides(here):
    """setuptools makes such packages known by a finder of its own, and not by a folder on the path."""
    import importlib.machinery
    import sys

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return importlib.machinery.ModuleSpec(name, None) if name == "known_to_a_finder" else None

    sys.meta_path.append(Finder)
    try:
        prepare.check_module("known_to_a_finder.train")
    finally:
        sys.meta_path.remove(Finder)


def test_programs(here):
    (here / "run").touch(mode=0o755)
    prepare.check_executable("./run", "")
    prepare.check_executable("sh", os.environ["PATH"])
    prepare.check_executable("run", f"/nowhere:{here}")
    prepare.check_executable("run", "/nowhere:")


def test_a_program_that_may_not_be_executed(here):
    (here / "run").touch(mode=0o644)
    with pytest.raises(ScriptNotExecutableError, match="is not executable") as caught:
        prepare.check_executable("./run", "")
    assert "chmod +x ./run" in caught.value.hint


def test_a_program_that_is_not_there(here):
    with pytest.raises(ScriptNotFoundError, match=r"the program \./run does not exist"):
        prepare.check_executable("./run", "")
    with pytest.raises(ScriptNotFoundError, match="the program run is neither on PATH"):
        prepare.check_executable("run", "/usr/bin")


# ---- Where this machine stands: its address, its place in a list, where machines meet. Names and addresses
# are those that every machine has (loopback) or none (RFC 5737).

NOWHERE = "192.0.2.7"


def site(words):
    return locate(resolve(read([*words.split(), "x.py"]), {}).settings)


def refusal(words):
    with pytest.raises(UsageError) as caught:
        site(words)
    return f"{caught.value.message} {caught.value.hint}"


def test_one_machine():
    found = site("")
    assert found.alone
    assert (found.address, found.hosts, found.master) == ("127.0.0.1", None, None)


def test_endpoint_lists_of_this_machine_alone():
    found = site("--servers 127.0.0.1:1,localhost:2 --trainers 127.0.0.1:3")
    assert found.alone


def test_a_list_gives_rank_and_meeting_point():
    found = site(f"--ips {NOWHERE},192.0.2.8 --host 192.0.2.8")
    assert not found.alone
    assert (found.rank, found.nnodes, found.master) == (1, (2, 2), f"{NOWHERE}:6768")
    assert (found.address, found.hosts) == ("192.0.2.8", ("192.0.2.8",))


def test_a_list_with_a_meeting_point_of_its_own():
    assert site(f"--ips {NOWHERE},192.0.2.8 --host {NOWHERE} --master 192.0.2.9:7").master == "192.0.2.9:7"


def test_the_first_machines_of_a_list_serve_the_store_together():
    listed = f"--ips {NOWHERE},192.0.2.8,192.0.2.9,192.0.2.10 --host {NOWHERE}"
    assert site(f"{listed} --master embedded:3").master == f"{NOWHERE}:6768,192.0.2.8:6768,192.0.2.9:6768"
    assert "the list has 4" in refusal(f"{listed} --master embedded:5")
    assert "--ips" in refusal("--nnodes 4 --master embedded:3")


def test_an_ipv6_list():
    found = site("--ips [2001:db8::1],[2001:db8::2] --host 2001:db8::2")
    assert (found.rank, found.master) == (1, "[2001:db8::1]:6768")


def test_endpoint_lists_of_several_machines():
    found = site(f"--servers {NOWHERE}:1,192.0.2.8:1 --trainers 192.0.2.8:2,{NOWHERE}:2 --host 192.0.2.8")
    assert (found.rank, found.nnodes, found.machines) == (1, (2, 2), (NOWHERE, "192.0.2.8"))


def test_hosts_match_exactly():
    """Paddle looked for the address within the text: 192.0.2.1 was found in 192.0.2.10."""
    said = refusal("--ips 192.0.2.10,192.0.2.11 --host 192.0.2.1")
    assert "192.0.2.1" in said
    assert "192.0.2.10, 192.0.2.11" in said


def test_a_machine_that_is_not_in_the_list_is_told_both():
    said = refusal(f"--ips {NOWHERE},192.0.2.8")
    assert "127.0.0.1" in said
    assert f"{NOWHERE}, 192.0.2.8" in said
    assert "--host" in said


def test_two_names_of_this_machine():
    assert "are both this node" in refusal(f"--ips 127.0.0.1,localhost,{NOWHERE}")
    assert "are both this node" in refusal("--ips 127.0.0.1,127.0.0.2")


def test_loopback_among_others():
    assert "127.0.0.1 in --ips means a different node" in refusal(f"--ips 127.0.0.1,{NOWHERE}")


def test_a_rank_that_the_list_does_not_give():
    assert "--rank 0 does not agree" in refusal(f"--ips {NOWHERE},192.0.2.8 --host 192.0.2.8 --rank 0")


def test_the_address_is_the_one_towards_the_meeting_point():
    assert site("--nnodes 2 --master 127.0.0.1:7").address == "127.0.0.1"
    assert site("--nnodes 2 --master [::1]:7").address == "::1"
    assert site("--nnodes 2 --master etcd://127.0.0.1:7,127.0.0.2:7").address == "127.0.0.1"
    assert source_address("127.0.0.1") == "127.0.0.1"


def test_a_network_interface():
    assert site("--nnodes 2 --master 192.0.2.9:7 --nic lo").address == "127.0.0.1"
    assert "this network interface does not exist" in refusal("--nnodes 2 --master 192.0.2.9:7 --nic nonic")
    assert "127.0.0.1" in addresses()


def test_a_host_that_is_not_this_machine():
    said = refusal(f"--nnodes 2 --master 192.0.2.9:7 --host {NOWHERE}")
    assert f"{NOWHERE} is not an address of this node" in said


def test_etcd_makes_even_one_machine_a_member():
    assert not site("--nnodes 1 --master etcd://127.0.0.1:7").alone


def test_processes_are_bound_to_cores_that_the_launcher_may_use(tmp_path):
    mine = min(os.sched_getaffinity(0))
    for name, text in {
        "proc/driver/nvidia/gpus/0000:0a:00.0/information": "",
        "sys/bus/pci/devices/0000:0a:00.0/numa_node": "0",
        "sys/devices/system/node/node0/cpulist": f"{mine},900000",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    warnings = []
    assert prepare.device_cores("node", ("0", "1"), ("0", "1"), warnings.append, tmp_path) == (str(mine), "")
    assert warnings == []


def test_unknown_numa_nodes_are_said(tmp_path):
    warnings = []
    assert prepare.device_cores("node", ("0",), ("0",), warnings.append, tmp_path) == ("",)
    assert "--numa_binding" in warnings[0]
