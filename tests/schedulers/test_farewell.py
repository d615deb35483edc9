"""What the end of an ssh connection means."""

import pytest

from fleetrun.schedulers.ssh import SshExit, judge_end


@pytest.mark.parametrize(
    ("ssh_exit", "code", "message"),
    [
        (SshExit(True, 0, 0), 0, ""),
        (SshExit(True, 3, 3), 3, "h1: fleetrun ended with exit code 3"),
        (SshExit(True, 255, 255), 255, "h1: fleetrun ended with exit code 255"),
        (SshExit(True, None, 255), 125, "h1: the connection was lost; its processes end there"),
        (SshExit(True, None, -9, cut=True), 125, ""),
        (SshExit(False, None, -9, cut=True), 125, ""),
        (
            SshExit(False, None, 255, ("ssh: connect to host h1 port 22: Connection refused",)),
            125,
            "h1: no connection, no sshd listens there (ssh: connect to host h1 port 22: Connection refused)",
        ),
        (
            SshExit(False, None, 255, ("@@@", "Host key verification failed.", "@@@")),
            125,
            "h1: no connection, its key is not the known one, or none is known: connect once by hand "
            "(Host key verification failed.)",
        ),
        (SshExit(False, None, 255), 125, "h1: no connection, ssh failed"),
    ],
)
def test_is_one_code_and_one_sentence(ssh_exit: SshExit, code: int, message: str):
    verdict = judge_end("h1", ssh_exit)
    assert (verdict.code, verdict.message) == (code, message)


@pytest.mark.parametrize(
    ("client", "said", "code"),
    [
        (127, "sh: 1: exec: /no/such/python: not found", 127),
        (1, "/usr/bin/python3: No module named fleetrun", 127),
        (2, "sh: 1: cd: can't cd to /no/such", 2),
    ],
)
def test_a_host_without_fleetrun_is_told_apart(client: int, said: str, code: int):
    verdict = judge_end("h1", SshExit(False, None, client, (said,)))
    assert verdict.code == code
    assert verdict.message.startswith(f"h1: fleetrun did not start there ({said})")
    assert not verdict.begun
