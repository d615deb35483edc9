"""What the probe in a process tells of it, with stand-ins for torch, and to whom."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fleetrun.probe.states import Peer, read_state
from tests.support.ports import free_port

INSIDE = Path(__file__).parents[2] / "fleetrun" / "probe" / "inside"
TORCH = "torch.distributed.distributed_c10d"


class Torch:
    """Its groups, and what its flight recorders have of calls."""

    def __init__(self, probe, monkeypatch):
        self.probe = probe
        self.entries = {"_dump_fr_trace_json": [], "_dump_nccl_trace_json": []}
        self.module = ModuleType(TORCH)
        self.module._world = SimpleNamespace(pg_group_ranks={}, pg_names={}, pg_backend_config={})
        self.module.is_initialized = lambda: True
        self.module.get_rank = lambda: 0
        recorder = ModuleType("torch._C._distributed_c10d")
        for name in self.entries:
            setattr(recorder, name, lambda *_, name=name: json.dumps({"entries": self.entries[name]}))
        monkeypatch.setitem(sys.modules, TORCH, self.module)
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", recorder)

    def group(self, name="0", config="cpu:gloo,cuda:gloo", calls=0):
        made = type("Group", (), {"_get_sequence_number_for_group": lambda self: calls})()
        self.module._world.pg_group_ranks[made] = {0: 0, 1: 1}
        self.module._world.pg_names[made] = name
        self.module._world.pg_backend_config[made] = config

    def call(self, number, what="gloo:all_reduce", group="0"):
        own = self.entries["_dump_nccl_trace_json" if what.startswith("nccl") else "_dump_fr_trace_json"]
        own.append(
            {
                "record_id": len(own), "process_group": [group, ""], "profiling_name": what, "is_p2p": False,
                "collective_seq_id": number, "p2p_seq_id": 0, "input_sizes": [[4]], "input_dtypes": ["Float"],
                "time_created_ns": time.time_ns(), "retired": True, "state": "scheduled",
            }
        )  # fmt: skip

    def state(self):
        said = {"rank": 0, "title": "trainer 0", "alive": True, "probe": self.probe._state()}
        return read_state(json.loads(json.dumps(said)))


@pytest.fixture
def probe(monkeypatch):
    monkeypatch.syspath_prepend(INSIDE)
    spec = spec_from_file_location("probe_under_test", INSIDE / "fleetrun_probe.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def torch(probe, monkeypatch):
    return Torch(probe, monkeypatch)


def test_collectives_are_counted_not_all_calls(torch):
    """Gloo's own number counts send and recv too, which other ranks do not make."""
    torch.group(calls=9)
    torch.call(1)
    torch.call(2)
    assert torch.state().groups["0"].entered == 2


def test_a_group_whose_calls_are_no_longer_recorded(torch):
    torch.group(calls=3)
    torch.group("1", calls=4000)
    for number in range(1, 4):
        torch.call(number, group="1")
    del torch.entries["_dump_fr_trace_json"][0]
    assert torch.state().groups["0"].entered == 3


def test_each_backend_of_a_group_has_numbers_of_its_own(torch):
    torch.group(config="cpu:gloo,cuda:nccl")
    torch.call(1, "nccl:all_reduce")
    torch.call(2, "nccl:all_reduce")
    torch.call(1, "gloo:barrier")
    groups = torch.state().groups
    assert {name: each.entered for name, each in groups.items()} == {"0 (gloo)": 1, "0 (nccl)": 2}
    assert [each.group for each in torch.state().calls] == ["0 (nccl)", "0 (nccl)", "0 (gloo)"]


def test_a_group_that_was_made_again_with_its_name(torch):
    torch.group("hash")
    torch.group()
    torch.call(1, group="hash")
    torch.call(1)
    torch.call(2)
    assert not torch.state().groups["hash"].again
    torch.call(1, group="hash")
    assert torch.state().groups["hash"].again
    assert not torch.state().groups["0"].again


def test_an_exception_in_a_shell_ends_nothing(torch, monkeypatch):
    """It is kept for a debugger, and the process goes on."""
    monkeypatch.setattr(sys, "last_value", ValueError("typed"), raising=False)
    assert torch.state().alive


def test_to_join_again_after_a_failure_is_to_join_once(torch):
    tried = []

    def init_process_group():
        tried.append(1)
        if len(tried) == 1:
            raise ConnectionError

    torch.module.init_process_group = init_process_group
    torch.probe._when_joined(torch.module)
    with pytest.raises(ConnectionError):
        torch.module.init_process_group()
    torch.module.init_process_group()
    torch.group()
    torch.call(1)
    assert list(torch.state().groups) == ["0"]


def test_send_and_recv_after_the_end_of_all_groups(torch, monkeypatch):
    """A thread of it may wait there still, in vain."""

    def destroyed(group, rank):
        raise ValueError("Group is not registered")

    torch.module.get_global_rank = destroyed
    text = "def recv(group, group_src, src=None): return torch.state()"
    exec(text, vars(torch.module) | {"torch": torch}, own := {})
    assert own["recv"](object(), 1).peer == Peer("recv")


# ---- To whom it answers

BEGIN = f"""
import os, socket, sys
sys.path.insert(0, {str(INSIDE)!r})
import fleetrun_probe
fleetrun_probe.install(sys.argv[1])
answer = lambda: fleetrun_probe.also("who", lambda: os.getpid())
"""


@contextlib.contextmanager
def started(folder, text):
    argv = [sys.executable, "-c", BEGIN + text, str(folder / "probe")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def heard(address):
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(60)
        asked.connect(str(address))
        return b"".join(iter(lambda: asked.recv(1 << 16), b""))


def test_a_process_that_it_forks_does_not_answer_in_its_place(tmp_path):
    text = """
read, write = os.pipe()
if os.fork() == 0:
    os.read(read, 1)
    answer()
    os._exit(0)
answer()
os.write(write, b"g")
os.wait()
print(os.getpid(), flush=True)
sys.stdin.read()
"""
    with started(tmp_path, text) as process:
        pid = int(process.stdout.readline())
        assert json.loads(heard(tmp_path / "probe"))["who"] == pid


def test_a_socket_of_the_script_with_the_number_of_its_own_is_the_scripts(tmp_path):
    """A daemon closes all that it has inherited."""
    text = """
answer()
print(flush=True)
sys.stdin.readline()
os.closerange(3, 100)
own = socket.socket(socket.AF_UNIX)
own.bind(sys.argv[1] + ".own")
own.listen(8)
print(own.fileno(), flush=True)
for _ in range(4):
    connection, _ = own.accept()
    connection.sendall(b"mine")
    connection.close()
"""
    with started(tmp_path, text) as process:
        process.stdout.readline()
        assert b"who" in heard(tmp_path / "probe")
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        with contextlib.suppress(OSError):
            heard(tmp_path / "probe")  # it notices
        assert [heard(tmp_path / "probe.own") for _ in range(4)] == [b"mine"] * 4


def test_what_an_earlier_program_left_is_gone(tmp_path):
    """Once this one answers itself: what a failed one left is still there after one that cleans up."""
    (tmp_path / "probe.last").touch()
    there = (tmp_path / "probe.last").exists
    text = "print(flush=True)\nsys.stdin.readline()\nanswer()\nprint(flush=True)\nsys.stdin.read()"
    with started(tmp_path, text) as process:
        process.stdout.readline()
        assert there()
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        assert not there()


def test_others_wait_until_the_first_rank_listens(probe, monkeypatch):
    port = free_port()  # no port of clients, because a connection could meet itself there
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    opened = []
    late = threading.Timer(0.2, lambda: opened.append(socket.create_server(("127.0.0.1", port))))
    late.start()
    try:
        probe._await_first("gloo")
        assert opened, "it went on before there was a listener"
    finally:
        late.join()
        for each in opened:
            each.close()
    for others in ({"store": object()}, {"rank": 0}, {"init_method": "file:///x"}):
        monkeypatch.setenv("MASTER_PORT", "no port: it would raise")
        probe._await_first("gloo", **others)
