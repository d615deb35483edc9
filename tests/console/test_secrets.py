"""Which values are never shown."""

import pytest

from fleetrun.console.text import MASK, masked


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN", "WANDB_API_KEY", "OPENAI_APIKEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID",
        "MYSQL_PASSWORD", "MYSQL_PWD", "DB_PASS", "db_passwd", "GOOGLE_APPLICATION_CREDENTIALS",
        "PRIVATE_KEY", "SSH_KEY", "KEY", "KEY_2", "TOKEN2", "GITHUB_TOKEN", "SECRET", "CLIENT_SECRET",
        "SENTRY_DSN", "SESSION_COOKIE", "BASIC_AUTH", "TokenForX",
    ],
)  # fmt: skip
def test_secrets(name):
    assert masked({name: "s3cr3t"}) == {name: MASK}


@pytest.mark.parametrize(
    "name",
    [
        "PATH", "PWD", "OLDPWD", "SSH_AUTH_SOCK", "PADDLE_TRAINER_ID", "KEYBOARD", "MONKEY", "KEYMAP_FILE",
        "GIT_AUTHOR_NAME", "TOKENIZERS_PARALLELISM", "COMPASS", "PASSAGE", "MASTER_ADDR", "BYPASS_CACHE",
    ],
)  # fmt: skip
def test_no_secrets(name):
    assert masked({name: "plain"}) == {name: "plain"}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("redis://user:s3cr3t@host:1/0", f"redis://user:{MASK}@host:1/0"),
        ("http://:s3cr3t@proxy:3128", f"http://:{MASK}@proxy:3128"),
        ("http://proxy:3128", "http://proxy:3128"),
        ("http://user@host/a:b@c", "http://user@host/a:b@c"),
        ("a,http://u:p@h,http://v:q@i", f"a,http://u:{MASK}@h,http://v:{MASK}@i"),
    ],
)
def test_passwords_inside_addresses(value, shown):
    assert masked({"SOMETHING": value}) == {"SOMETHING": shown}


def test_that_a_secret_is_empty_is_no_secret():
    assert masked({"HF_TOKEN": ""}) == {"HF_TOKEN": ""}
