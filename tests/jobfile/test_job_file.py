"""What job files say, as settings; and what is wrong with one, by file, line and key."""

import pytest

from fleetrun.envs.contract import Mode, Role
from fleetrun.envs.settings.options import RoleSettings
from tests.jobfile.folder import loaded, refusal, resolved

SCRIPT = 'script = "train.py"\n'

OPTIONS = [
    ("nproc_per_node = 4", {"nproc_per_node": 4}),
    ('nproc_per_node = "gpu"', {"nproc_per_node": "gpu"}),
    ("nproc-per-node = 4", {"nproc_per_node": 4}),
    ("worker_num = 3", {"trainer_num": 3, "server_num": 1, "run_mode": Mode.PS}),
    ("devices = [0, 1]", {"devices": ("0", "1"), "device_kind": "gpu"}),
    ('xpus = "0,1"', {"devices": ("0", "1"), "device_kind": "xpu"}),
    ("stop_timeout = 2.5", {"stop_timeout": 2.5}),
    ('timeout = "2h"', {"timeout": 7200.0}),
    ("sort_ip = true", {"sort_ip": True}),
    ("enable_gpu_log = false", {"enable_gpu_log": False}),
    ("module = true", {"module": True}),
    ('follow = ["trainer:0", "ps"]', {"follow": ((Role.TRAINER, (0,)), (Role.SERVER, None))}),
    ('follow = "evaluator"', {"follow": ((Role.EVALUATOR, None),)}),
    ("nnodes = [2, 4]", {"nnodes": (2, 4), "on_node_loss": "shrink"}),
    ("port_range = [5000, 6000]", {"port_range": (5000, 6000)}),
    ('log_rotate = "1MB"', {"log_rotate": 1_000_000}),
    ('elastic_server = "h:2379"\nnnodes = 2', {"master": "etcd://h:2379"}),
    (
        'servers = ["h:1", "h:2"]\ntrainers = "h:3"',
        {"servers": ("h:1", "h:2"), "trainers": ("h:3",)},
    ),
    (
        "heter_worker_num = [1, 2]\nserver_num = 1",
        {"heter_worker_num": (1, 2), "run_mode": Mode.PS_HETER},
    ),
    (
        'heter_workers = [["h:4"], ["h:5", "h:6"]]\nservers = "h:1"\ntrainers = "h:2"',
        {"heter_workers": (("h:4",), ("h:5", "h:6"))},
    ),
    (
        'scheduler = "slurm"\nscheduler_option = {partition = "gpu", gpus = 2}',
        {"scheduler_option": ("partition=gpu", "gpus=2")},
    ),
    ('scheduler = "slurm"\nscheduler_option = ["a=b", "c=d"]', {"scheduler_option": ("a=b", "c=d")}),
    ("[roles.trainer]\ncount = 3", {"nproc_per_node": 3}),
    ("[roles.worker]\ncount = 3\n[roles.ps]\ncount = 2", {"trainer_num": 3, "server_num": 2}),
    ('run_mode = "ps"\n[roles.trainer]\ncount = 3', {"trainer_num": 3, "run_mode": Mode.PS}),
    ("with_gloo = 1\n[roles.trainer]\ncount = 3\n[roles.server]\ncount = 1", {"trainer_num": 3}),
    ("[roles.coordinator]\ncount = 1\n[roles.server]\ncount = 1", {"coordinator_num": 1}),
    ("[roles.heter]\ncount = [1, 1]\n[roles.server]\ncount = 1", {"heter_worker_num": (1, 1)}),
    ("[roles.trainer.resources]\ndevices = [1]", {"devices": ("1",)}),
]


@pytest.mark.parametrize(("text", "expected"), OPTIONS, ids=[text for text, _ in OPTIONS])
def test_options(text, expected):
    settings = resolved(SCRIPT + text).settings
    assert {name: getattr(settings, name) for name in expected} == expected


WRONG = [
    ("nproc_per_nod = 4", "job.toml:2: nproc_per_nod is not an option of fleetrun", "nproc_per_node"),
    ("nprocs = 4", "job.toml:2: nprocs is not an option of fleetrun", "Did you mean nproc_per_node?"),
    ("scirpt = 'x'", "job.toml:2: scirpt is not an option of fleetrun", "script"),
    ("zzzzzzzzzz = 1", "job.toml:2: zzzzzzzzzz is not an option", "fleetrun --help"),
    ("config = 'x'", "job.toml:2: config is for the command line only", ""),
    ("rdzv_id = 'x'", "job.toml:2: rdzv_id is an option of torchrun", ""),
    ("nproc_per_node = 0", "job.toml:2: nproc_per_node is '0'; it must be a whole number from 1", ""),
    ("nproc_per_node = true", "job.toml:2: nproc_per_node is 'true'", ""),
    ("nproc_per_node = 1.5", "job.toml:2: nproc_per_node is '1.5'", ""),
    ("nproc_per_node = [1, 2]", "job.toml:2: nproc_per_node is a list; it must be one value", ""),
    ("log_dir = ['a', 'b']", "job.toml:2: log_dir is a list; it must be one value", ""),
    ("sort_ip = [true]", "job.toml:2: sort_ip is a list; it must be one value", ""),
    ("sort_ip = 'perhaps'", "job.toml:2: sort_ip is 'perhaps'; it must be true or false", ""),
    ("job_id = {a = 1}", "job.toml:2: job_id is a table; it must be a string or a number", ""),
    ("job_id = 2026-11-22", "job.toml:2: job_id is a date or time", ""),
    ("devices = [[[0]]]", "job.toml:2: devices is a nested list", ""),
    ("timeout = nan", "job.toml:2: timeout is 'nan'", ""),
    ("timeout = -1", "job.toml:2: timeout is '-1'", ""),
    (f"timeout = 0x{'f' * 5000}", "job.toml:2: timeout is too large", ""),
    ('job_id = "a\\u0000b"', "job.toml:2: job_id has a NUL character", ""),
    ("follow = 'trainr'", "job.toml:2: follow is 'trainr'", "Did you mean trainer"),
    ("trainer_num = 2\nworker_num = 3", "job.toml:3: worker_num repeats trainer_num", ""),
    ("args = '--lr 1'", "job.toml:2: args must be a list", 'args = ["--lr", "0.1"]'),
    ("args = [['a']]", "job.toml:2: args is a nested list", ""),
    ("args = [1, [2]]", "job.toml:2: args is a nested list", ""),
    ("environment = 1", "job.toml:2: environment must be a table", "[environment]"),
    ("[environment]\nDEBUG = true", "job.toml:3: environment.DEBUG must be a string or a number", ""),
    ("[environment]\nRANK = 0", "job.toml:3: environment.RANK is set by fleetrun", ""),
    ("[environment]\nFLEETRUN_TOKEN = 'x'", "environment.FLEETRUN_TOKEN is set by fleetrun", ""),
    ("[environment]\nPADDLE_NNODES = 2", "is an option of fleetrun; write nnodes = ... instead", ""),
    ("[environment]\n'a=b' = 1", "job.toml:3: environment.a=b is not a valid variable name", ""),
    ("[environment]\n'' = 1", "is not a valid variable name", ""),
    ("[environment]\nA = ['b']", "environment.A is a nested list", ""),
    ("[roles.trainers]\ncount = 1", "job.toml:2: roles.trainers is not a role", "trainer"),
    ("[roles]\ntrainer = 2", "job.toml:3: roles.trainer must be a table", "[roles.trainer]"),
    ("[roles.trainer]\ncuont = 1", "job.toml:3: roles.trainer.cuont is not a key of roles.trainer", "count"),
    ("[roles.trainer]\non = 'each'", "job.toml:3: roles.trainer.on is not a key", ""),
    ("[roles.trainer.resources]\ngpus = 1", "job.toml:3: roles.trainer.resources.gpus is not a resource", ""),
    ("[roles.trainer.resources]\nthreads = 0", "roles.trainer.resources.threads is '0'", ""),
    ("[roles.server]\ncount = 1\nresources.devices = [0]", "is for trainers and evaluators", ""),
    ("[roles.trainer]\nmodule = 'yes'", "job.toml:3: roles.trainer.module must be true or false", ""),
    ("[roles.trainer]\nscript = ''", "job.toml:3: roles.trainer.script is ''; it must not be empty", ""),
    ("[roles.trainer]\nscript = 1", "job.toml:3: roles.trainer.script must be a string", ""),
    ("[roles.evaluator]\ncount = 0", "job.toml:3: roles.evaluator.count is '0'", ""),
    ("[roles.evaluator]\non = 'last'", "job.toml:3: roles.evaluator.on is 'last'; it must be \"first\"", ""),
    ("[roles.evaluator.resources]\ndevices = ['x y']", "roles.evaluator.resources.devices is 'x y'", ""),
    ("server_num = 2\n[roles.server]\ncount = 1", "roles.server.count repeats server_num", ""),
    (
        "[roles.server]\nscript = 's.py'",
        "job.toml:2: [roles.server] is only for mode ps",
        "count = 1",
    ),
    ("[roles.ps]\ncount = 1\n[roles.server]\ncount = 1", "job.toml:4: roles.server repeats", ""),
    ("[variables]\nx = [1]", "job.toml:3: variables.x must be a string or a number", ""),
    ("run_mode = 'collective'\nserver_num = 2", "server_num = 2 (job.toml:3) is only for mode ps", ""),
    (
        "nproc_per_node = 2\nserver_num = 2",
        "nproc_per_node = 2 (job.toml:2) is only for mode",
        "",
    ),
    ('metrics_host = "0.0.0.0"', "needs --metrics_port", ""),
    ("master_addr = 'h'\nmaster = 'h:1'\nnnodes = 2", "exclude each other", ""),
]


@pytest.mark.parametrize(("text", "message", "hint"), WRONG, ids=[text[:50] for text, _, _ in WRONG])
def test_what_is_wrong_is_told_with_its_place(text, message, hint):
    error = refusal(SCRIPT + text)
    assert message in error.message
    assert hint in (error.hint or "")


def test_nothing_that_a_terminal_obeys_comes_out_of_a_file():
    for text in ('"\\u001b[31mx" = 1', 'include = "\\u001b[31mx"', '[environment]\n"\\u0007=" = 1'):
        assert refusal(text).message.isprintable()


def test_roles():
    text = """
        script = "train.py"
        args = ["--lr", 0.5]
        [environment]
        A = "all"
        N = 2
        [roles.server]
        count = 1
        script = "-m"
        module = true
        args = []
        [roles.trainer.environment]
        B = "b"
        [roles.evaluator]
        count = 2
        on = "each"
        [roles.evaluator.resources]
        devices = ["0", 1]
        threads = 3
    """
    settings = resolved(text).settings
    assert settings.environment == (("A", "all"), ("N", "2"))
    assert (settings.script, settings.script_args) == ("train.py", ("--lr", "0.5"))
    assert settings.role_settings(Role.SERVER) == RoleSettings(
        role=Role.SERVER, where="job.toml:7", script="-m", module=True, args=()
    )
    assert settings.role_settings(Role.TRAINER).environment == (("B", "b"),)
    assert settings.role_settings(Role.EVALUATOR) == RoleSettings(
        role=Role.EVALUATOR, where="job.toml:14", count=2, each=True, devices=("0", "1"), threads=3
    )
    assert settings.role_settings(Role.HETER) == RoleSettings(role=Role.HETER)


def test_what_includes_counts_more_than_what_is_included_key_by_key():
    file = loaded(
        'include = ["one.toml", "two.toml"]\nworker_num = 2\n[environment]\nA = "job"',
        one='script = "one.py"\ntrainer_num = 7\n[environment]\nA = "one"\nB = "one"\nC = "one"',
        two='script = "two.py"\n[environment]\nB = "two"\n[roles.evaluator]\nscript = "e.py"',
    )
    assert file.script == "two.py"
    assert dict(file.environment) == {"A": "job", "B": "two", "C": "one"}
    (option,) = file.options
    assert (option.alias, option.texts, option.where) == ("worker_num", ("2",), "job.toml:2")
    assert [wish.where for wish in file.roles] == ["two.toml:4"]


def test_an_error_in_an_included_file_names_that_file():
    assert refusal('include = "a.toml"', a="\n\nnope = 1").message.startswith("a.toml:3: nope is not")


def test_what_a_command_line_can_say_too():
    assert loaded("script = 'x'\ntrainer_num = 2\n[roles.server]\ncount = 1").typable
    assert not loaded("[environment]\nA = 'b'").typable
    assert not loaded("[roles.evaluator]").typable
    assert not loaded("[roles.trainer]\nargs = []").typable
