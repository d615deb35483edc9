"""The words of a command line, by table: which are options, which the script's."""

import pytest

from fleetrun.envs.settings.command_line import read
from fleetrun.errors import UsageError


def given(*words: str) -> list[tuple[str, str, str]]:
    return [(each.origin, each.option.name, each.text) for each in read([*words, "x.py"]).options]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--trainer_num", "2"], ("--trainer_num", "trainer_num", "2")),
        (["--trainer-num", "2"], ("--trainer-num", "trainer_num", "2")),
        (["--trainer_num=2"], ("--trainer_num", "trainer_num", "2")),
        (["--nproc-per_node=2"], ("--nproc-per_node", "nproc_per_node", "2")),
        (["--worker_num", "2"], ("--worker_num", "trainer_num", "2")),
        (["--workers=a:1"], ("--workers", "trainers", "a:1")),
        (["--gpus=0,1"], ("--gpus", "devices", "0,1")),
        (["--selected-gpus", "0"], ("--selected-gpus", "devices", "0")),
        (["--xpus", "0"], ("--xpus", "devices", "0")),
        (["--selected_xpus", "0"], ("--selected_xpus", "devices", "0")),
        (["--npus", "0"], ("--npus", "devices", "0")),
        (["--np", "2:4"], ("--np", "nnodes", "2:4")),
        (["--elastic_server", "a:1"], ("--elastic_server", "master", "a:1")),
        (["--node-rank", "0"], ("--node-rank", "rank", "0")),
        (["--max-restarts", "0"], ("--max-restarts", "max_restart", "0")),
        (["--rank", "-1"], ("--rank", "rank", "-1")),
        (["--elastic_pre_hook=-x"], ("--elastic_pre_hook", "elastic_pre_hook", "-x")),
        (["--elastic_pre_hook=a=b"], ("--elastic_pre_hook", "elastic_pre_hook", "a=b")),
        (["--standalone"], ("--standalone", "standalone", "true")),
        (["--dry_run=false"], ("--dry_run", "dry_run", "false")),
        (["--log_overwrite"], ("--log_overwrite", "log_overwrite", "true")),
        (["--log_overwrite", "1"], ("--log_overwrite", "log_overwrite", "1")),
        (["--log_overwrite=False"], ("--log_overwrite", "log_overwrite", "False")),
        (["--enable_gpu_log", "false"], ("--enable_gpu_log", "enable_gpu_log", "false")),
        (["-m"], ("-m", "module", "true")),
        (["--rdzv-backend=c10d"], ("--rdzv-backend", "rdzv_backend", "c10d")),
        (["--rdzv_id", "7"], ("--rdzv_id", "rdzv_id", "7")),
        (["-r", "3"], ("-r", "redirects", "3")),
        (["-t=0:3,1:1"], ("-t", "tee", "0:3,1:1")),
        (["-t3"], ("-t", "tee", "3")),
    ],
)
def test_an_option_and_its_value(words, expected):
    assert given(*words) == [expected]


@pytest.mark.parametrize(
    ("argv", "script", "rest"),
    [
        (["x.py"], "x.py", ()),
        (["x.py", "--lr", "1", "--help", "--gpus", "0"], "x.py", ("--lr", "1", "--help", "--gpus", "0")),
        (["x.py", "--", "-m"], "x.py", ("--", "-m")),
        (["x.py", ""], "x.py", ("",)),
        (["--gpus", "0", "--", "x.py", "--", "a"], "x.py", ("--", "a")),
        (["--", "--odd-name"], "--odd-name", ()),
        (["-m", "pkg.mod", "--lr", "1"], "pkg.mod", ("--lr", "1")),
        (["-m", "--log_dir", "d", "pkg.mod", "-m"], "pkg.mod", ("-m",)),
        (["--dry_run", "2", "x.py"], "2", ("x.py",)),
        (["--sort_ip", "x.py", "1"], "x.py", ("1",)),
        (["echo", "hi"], "echo", ("hi",)),
        (["-"], "-", ()),
        ([], None, ()),
        (["--gpus", "0"], None, ()),
        (["--"], None, ()),
    ],
)
def test_everything_from_the_script_on_is_the_scripts(argv, script, rest):
    line = read(argv)
    assert (line.script, line.script_args) == (script, rest)


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--gpus", "0", "--help", "--foo"]])
def test_help_wins_over_what_follows(argv):
    action = read(argv).action
    assert action is not None
    assert action.option.name == "help"


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        (["--nproc", "2", "x.py"], "unknown option --nproc", "Did you mean --nproc_per_node?"),
        (["--nproc_per_nod=2", "x.py"], "unknown option --nproc_per_nod", "Did you mean --nproc_per_node"),
        (["--gpu", "0"], "unknown option --gpu", "Did you mean --gpus?"),
        (["-gpus", "0"], "unknown option -gpus", "Did you mean --gpus?"),
        (["--GPUS", "0"], "unknown option --GPUS", "Did you mean --gpus?"),
        (["--server", "1"], "unknown option --server", "--server_num or --servers"),
        (["-x"], "unknown option -x", "fleetrun --help"),
        (["-p", "2", "x.py"], "unknown option -p", "fleetrun --help"),
        (["-V"], "unknown option -V", "--version"),
        (["--gpus"], "--gpus needs a value: --gpus LIST", None),
        (["--gpus", "--json", "x.py"], "--gpus needs a value", None),
        (["--module=pkg.mod"], "--module takes no value", None),
        (["-trainers", "x.py"], "unknown option -trainers", "--trainers"),
        (["--auto_tuner_json", "a.json", "x.py"], "--auto_tuner_json is", None),
        (["--cluster-topo-path=x"], "Paddle's auto parallel mode", None),
        (["--scale=1"], "use --nnodes MIN:MAX", None),
        (["ipu", "x.py"], "Graphcore", None),
        (["run_check"], "self-test", None),
        (["\N{EN DASH}gpus", "0", "x.py"], "typographic dash", "two hyphens"),
    ],
)
def test_what_is_no_option_is_refused_with_advice(argv, message, hint):
    with pytest.raises(UsageError) as caught:
        read(argv)
    assert message in caught.value.message
    assert hint is None or hint in (caught.value.hint or "")
