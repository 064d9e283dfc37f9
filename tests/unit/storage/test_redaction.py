"""Settings, URLs and texts with secrets, as each exit shows them. test_secrets.py tests a whole run."""

import pytest

from storage.redaction import MARK, is_secret, marked, redacted, redacted_text, split_credentials

SECRET = "c4n4ry"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"http://u:{SECRET}@host:5000/x", "http://***@host:5000/x"),
        (f"http://u:p@{SECRET}@host/x", "http://***@host/x"),  # marks that a URL should have encoded
        (f"http://u:p/{SECRET}@host/x", "http://***@host/x"),
        (f"http://u:p?{SECRET}@host/x", "http://***@host/x"),
        (f"http://{SECRET}@host/a@b", "http://***@host/a@b"),
        (f"https://host/x?token={SECRET}&{SECRET}#top", "https://host/x?token=***&***#top"),
        (
            "http://host:5000/#/experiments/3/runs?workflowType=x",
            "http://host:5000/#/experiments/3/runs?workflowType=x",
        ),
        ("sqlite:///runs/mlflow.db", "sqlite:///runs/mlflow.db"),
    ],
)
def test_a_url(url: str, shown: str) -> None:
    assert redacted_text(f"given '{url}'; must") == f"given '{shown}'; must"
    assert redacted_text(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        f"run c.yaml 'reward.args={{api_key: {SECRET}, gain: 2}}' reward.args.password={SECRET}",
        f"ValueError: {{'url': 'x', 'api_key': '{SECRET}'}}",
        f"Client(token='{SECRET}')",
        f"export OPENAI_API_KEY={SECRET}",
        f"sbatch --api-key {SECRET}",
        f"sbatch --api-key={SECRET}",
        f"run c.yaml reward.args.headers={{X-Anything: {SECRET}, b: 2}} reward.args.api_keys=[a,{SECRET}]",
        f"-H 'X-Api-Key: {SECRET}'",
        f"-H 'Authorization: Basic {SECRET}-long'",
        f"{{'headers-of': 1, 'Authorization': 'Basic {SECRET}-long'}}",
        f"mysql --user u pass={SECRET}",
        f"`stageline resume runs/a key=value-{SECRET}`",
        f"key=value.{SECRET}",
        f"Authorization: Bearer {SECRET}-long",
        f"it is sk-{SECRET}-0123456789abcdef",
    ],
)
def test_a_text(text: str) -> None:
    shown = redacted_text(text)
    assert SECRET not in shown
    assert MARK in shown
    assert redacted_text(shown) == shown


def test_prose_stays_as_it_is() -> None:
    text = "reward.args.key: given 2; the token: none (max_tokens=3, key_env=JUDGE_KEY), see rollout.rows=16"
    text += "; write key=value, `stageline resume runs/a key=value`: not as (key=value)"
    assert redacted_text(text) == text


@pytest.mark.parametrize("password", [f"p '{SECRET}", f'p"{SECRET}', f"p`<{SECRET}>", f"{SECRET}/ /@"])
def test_a_value_that_is_a_url_with_an_odd_password(password: str) -> None:
    assert redacted({"uri": f"http://u:{password}@host/x"}) == {"uri": "http://***@host/x"}


def test_settings_by_their_names_however_deep() -> None:
    given = {
        "body": {"api_key": SECRET, "nested": [{"Authorization": [SECRET]}], "max_tokens": 3, "apiKey": None},
        "headers": {"x-anything": SECRET, "x-flag": True},
        "url": f"http://u:{SECRET}@host",
        "command": ["run", "--token", SECRET],
        "key_env": "JUDGE_KEY",
        "pin": {"password": 1234},
    }
    assert redacted(given) == {
        "body": {"api_key": MARK, "nested": [{"Authorization": [MARK]}], "max_tokens": 3, "apiKey": None},
        "headers": {"x-anything": MARK, "x-flag": True},
        "url": f"http://{MARK}@host",
        "command": ["run", "--token", MARK],
        "key_env": "JUDGE_KEY",
        "pin": {"password": MARK},
    }
    assert marked({"a.key": MARK, "b": f"http://{MARK}@host", "c": "rows"}) == ["a.key", "b"]


def test_names() -> None:
    secret = "key api_key apiKey APIKEY X-Api-Key access_token accesstoken client_secret DB_PASSWORD key2 a.b.token"
    assert all(map(is_secret, secret.split()))
    others = "key_env token_ids pad_token max_tokens tokens_per_pass tokenizer monkey tokens secret_name rows"
    assert not any(map(is_secret, others.split()))


def test_credentials_are_taken_off_a_url() -> None:
    assert split_credentials("http://u:p%40/w@h:3/x") == ("http://h:3/x", "u", "p@/w")
    assert split_credentials("http://h:3/x") == ("http://h:3/x", "", "")
