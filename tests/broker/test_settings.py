"""The configuration: where values come from, and that each mistake is told with its path and its value."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from headrace.broker import settings
from headrace.broker.errors import ConfigError
from headrace.broker.models import LlamacppModel, ScriptedModel
from headrace.broker.settings import Settings, load

ROOT = Path(__file__).parents[2]
MODEL = "models: [{name: m, engine: scripted}]\n"


def load_text(folder: Path, text: str, **env: str) -> Settings:
    file = folder / "test.yaml"
    file.write_text(text, "utf-8")
    return load(file, env)


def error_of(folder: Path, text: str, **env: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_text(folder, text, **env)
    return caught.value.message.removeprefix(f"{folder}/test.yaml: ")


# -- where values come from ------------------------------------------------------------------------------------------


def test_the_example_file_says_what_the_defaults_are() -> None:
    example = load(ROOT / "headrace.yaml", {})
    bare = Settings(example.models)
    assert example == bare


def test_the_installed_file_is_read_if_there_is_none_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(None, {}) == load(ROOT / "headrace.yaml", {})


def test_a_file_in_the_working_folder_is_read_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "headrace.yaml").write_text(MODEL + "api: {port: 1234}")
    assert load(None, {}).api.port == 1234


def test_a_model_is_read_by_its_engine(tmp_path: Path) -> None:
    text = "models: [{name: a, engine: scripted, slots: 3}, {name: b, engine: llamacpp, path: /x.gguf}]"
    found = load_text(tmp_path, text)
    assert found.models == [ScriptedModel(name="a", slots=3), LlamacppModel(name="b", path="/x.gguf")]
    assert found.model("b") is found.models[1]


def test_a_model_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model is named 'x' \(there are: m\)"):
        load_text(tmp_path, MODEL).model("x")


def test_the_environment_goes_before_the_file(tmp_path: Path) -> None:
    text = MODEL + "api: {port: 1, host: a}\nqueue: {lease_s: 9.0}"
    found = load_text(tmp_path, text, HEADRACE_API__PORT="2", HEADRACE_REDIS__URL="redis://h:1/0", HOME="/x")
    assert (found.api.port, found.api.host, found.queue.lease_s) == (2, "a", 9.0)
    assert found.redis.url == "redis://h:1/0"


def test_the_short_names_stand_for_their_fields(tmp_path: Path) -> None:
    found = load_text(tmp_path, MODEL, HEADRACE_PORT="81", HEADRACE_DATA="1", HEADRACE_LOG_LEVEL="debug")
    assert (found.api.port, found.data_dir, found.log_level) == (81, "1", "debug")


def test_null_in_the_environment_unsets_a_value(tmp_path: Path) -> None:
    text = MODEL + "redis: {url: 'redis://h'}"
    assert load_text(tmp_path, text, HEADRACE_REDIS__URL="null").redis.url is None


def test_a_key_says_what_its_owner_may_have(tmp_path: Path) -> None:
    key = f"keys: [{{owner: a, sha256: {'a' * 64}, weight: 2.5, max_waiting_jobs: 3}}]"
    [found] = load_text(tmp_path, MODEL + key).keys
    assert (found.weight, found.max_waiting_jobs, found.max_waiting_bytes) == (2.5, 3, None)


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("weight: 0.0", "keys[0].weight: 0.0 must be 0.001 to 1000"),
        ("limits: {max_jobs: 0}", "keys[0].limits.max_jobs: 0 must be 1 or more"),
        ("limits: {jobs: 1}", "keys[0].limits: Object contains unknown field `jobs`"),
        ("scopes: [root]", "keys[0].scopes[0]: Invalid enum value 'root' (it is 'root')"),
        (
            "expires: 2027-01-31",
            "keys[0].expires: Expected `datetime | null`, got `date` (it is datetime.date(2027, 1, 31))",
        ),
        ("routes: [v1]", "keys[0].routes: 'v1' must begin with a slash"),
        ("weight: .nan", "keys[0].weight: nan must be 0.001 to 1000"),
        ("max_waiting_bytes: -1", "keys[0].max_waiting_bytes: -1 must not be negative"),
    ],
)
def test_a_mistake_in_a_key_is_told(tmp_path: Path, field: str, told: str) -> None:
    assert error_of(tmp_path, MODEL + f"keys: [{{owner: a, sha256: {'a' * 64}, {field}}}]") == told


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("api: {port: http}", "api.port: Expected `int`, got `str` (it is 'http')"),
        ("api: {port: true}", "api.port: Expected `int`, got `bool` (it is True)"),
        ("api: {prot: 80}", "api: Object contains unknown field `prot`"),
        ("apis: {}", "the file: Object contains unknown field `apis`"),
        ("api: 3", "api: Expected `object`, got `int` (it is 3)"),
        ("api: {port: 0}", "api.port: 0 must be a port number"),
        ("api: {grace_s: -1.0}", "api.grace_s: -1.0 must not be negative"),
        ("queue: {lease_s: -5}", "queue.lease_s: -5.0 must not be negative"),
        ("redis: {shards: 0}", "redis.shards: 0 must be 1 to 65536"),
        ("queue: {batch_share: 1.5}", "queue.batch_share: 1.5 must be 0 to 1"),
        ("queue: {max_waiting_tokens: -1}", "queue.max_waiting_tokens: -1 must not be negative"),
        ("log_level: loud", "log_level: Invalid enum value 'loud' (it is 'loud')"),
        ("keys: [{owner: a, sha256: ABC}]", "keys[0].sha256: '3 characters' must be 64 lower-case hex digits"),
        ("keys: [{owner: a, sha256: 7}]", "keys[0].sha256: Expected `str`, got `int` (it is 7)"),
    ],
)
def test_a_mistake_is_told_with_its_path_and_value(tmp_path: Path, text: str, told: str) -> None:
    assert error_of(tmp_path, MODEL + text) == told


@pytest.mark.parametrize(
    ("models", "told"),
    [
        ("[]", "models: [] must name at least one model"),
        ("[{name: '', engine: scripted}]", "models[0].name: '' must be 1 to 128 printable characters without braces"),
        ("[{name: 'a{b', engine: scripted}]", "models[0].name: 'a{b' must be 1 to 128 printable characters"),
        ("[{name: a, engine: scripted}, {name: a, engine: scripted}]", "models[1].name: 'a' stands twice"),
        ("[{name: a, engine: scripted, slots: 0}]", "models[0].slots: 0 must be at least 1"),
        ("[{name: a, engine: scripted, script: [a, {}]}]", "models[0].script[1]"),
        (
            "[{name: a, engine: scripted, script: [{tool_call: {}}]}]",
            "models[0].script[0].tool_call: Object missing required field `name`",
        ),
        ("[{name: a, engine: scripted, dimensions: 0}]", "models[0].dimensions: 0 must be 1 to 65536"),
        ("[{name: a, engine: scripted, script_end: x}]", "models[0].script_end: 'x' must be eos, limit or error"),
        ("[{name: a, engine: llamacpp}]", "models[0].path: None one of `path`, `source` and `uri` says where"),
        ("[{name: a, engine: gpt}]", "models[0].engine: Invalid value 'gpt' (it is 'gpt')"),
        ("[{engine: scripted}]", "models[0]: Object missing required field `name`"),
    ],
)
def test_a_mistake_in_a_model_is_told_with_its_path_and_value(tmp_path: Path, models: str, told: str) -> None:
    assert error_of(tmp_path, f"models: {models}").startswith(told)


def test_what_is_no_configuration_at_all_is_told(tmp_path: Path) -> None:
    assert error_of(tmp_path, "- a list") == "must be a mapping, not list"
    assert error_of(tmp_path, "a: [").startswith("is not YAML: ")
    assert error_of(tmp_path, "") == "the file: Object missing required field `models`"


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load(tmp_path / "none.yaml", {})


def test_mistakes_in_the_environment_are_told(tmp_path: Path) -> None:
    assert error_of(tmp_path, MODEL, HEADRACE_API__PORT="x") == "api.port: Expected `int`, got `str` (it is 'x')"
    assert error_of(tmp_path, MODEL, HEADRACE_API__PORT="[") == "HEADRACE_API__PORT='[': is not a value"
    assert error_of(tmp_path, MODEL, HEADRACE_WEB__PORT="1").startswith("HEADRACE_WEB__PORT: there is no section 'web'")
    assert error_of(tmp_path, MODEL, HEADRACE_API__A__B="1").startswith("HEADRACE_API__A__B: ")


def test_every_field_of_a_section_can_be_overridden(tmp_path: Path) -> None:
    for section in ("redis", "queue", "api", "worker"):
        for field in getattr(settings.Settings([]), section).__struct_fields__:
            default = getattr(getattr(Settings([]), section), field)
            text = "other" if default is None or isinstance(default, str | list) else str(type(default)(7))
            text = {"batch_share": "0.7", "origins": "['https://a.org']", "hosts": "['a.org']"}.get(field, text)
            found = load_text(tmp_path, MODEL, **{f"HEADRACE_{section}__{field}".upper(): text})
            assert str(getattr(getattr(found, section), field)) == text


WEIGHTS = {"name": "m", "engine": "vllm", "hub": "org/model"}


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ({**WEIGHTS, "hub": None}, "models[0].path"),
        ({**WEIGHTS, "path": "/x"}, "models[0].path"),
        ({**WEIGHTS, "hub": None, "path": "/x", "revision": "main"}, "models[0].revision"),
        ({**WEIGHTS, "context_tokens": 1}, "models[0].context_tokens"),
        ({**WEIGHTS, "arguments": {"trust_remote_code": True}}, "models[0].arguments"),
        ({**WEIGHTS, "arguments": {"max_num_batched_tokens": "two"}}, "models[0].arguments.max_num_batched_tokens"),
        ({**WEIGHTS, "arguments": {"tensor_parallel_size": 2}}, "models[0].arguments"),
        ({**WEIGHTS, "gpus": 1.5}, "models[0].gpus"),
        ({**WEIGHTS, "gpus": -1}, "models[0].gpus"),
        ({**WEIGHTS, "gpus": 3, "tensor_parallel": 2}, "models[0].gpus"),
        ({**WEIGHTS, "tensor_parallel": 0}, "models[0].tensor_parallel"),
        ({**WEIGHTS, "accelerator": "A100"}, "models[0].accelerator"),
        ({**WEIGHTS, "gpus": 2, "tensor_parallel": 2, "strategy": "SPREAD"}, "models[0].strategy"),
        ({**WEIGHTS, "strategy": "PILE"}, "models[0].strategy"),
        ({**WEIGHTS, "uri": "s3://weights/m"}, "models[0].path"),
        ({**WEIGHTS, "hub": None, "uri": "ftp://weights/m"}, "models[0].uri"),
        ({**WEIGHTS, "adapters": [{"name": "a"}]}, "models[0].adapters[0].path"),
        ({**WEIGHTS, "adapters": [{"name": "m", "path": "/a"}]}, "models[0].adapters[0].name"),
        ({**WEIGHTS, "adapters_loaded": 0}, "models[0].adapters_loaded"),
        ({**WEIGHTS, "aliases": ["m"]}, "models[0].aliases[0]"),
        ({**WEIGHTS, "fallbacks": ["m"]}, "models[0].fallbacks[0]"),
        ({**WEIGHTS, "fallbacks": ["other"]}, "models[0].fallbacks[0]"),
        ({"name": "m", "engine": "remote", "url": "http://x", "adapters": [{"name": "a"}]}, "models[0].adapters"),
        ({"name": "m", "engine": "remote", "url": "localhost:80"}, "models[0].url"),
        ({"name": "m", "engine": "remote", "url": "http://x", "event_timeout_s": 0}, "models[0].event_timeout_s"),
        ({"name": "m", "engine": "remote", "url": "http://x", "api": "soap"}, "models[0].api"),
        ({"name": "m", "engine": "nonsense"}, "models[0]"),
    ],
)
def test_wrong_settings_of_an_engine_are_named(tmp_path: Path, model: dict[str, object], path: str) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text(yaml.safe_dump({"models": [model]}))
    with pytest.raises(ConfigError, match=re.escape(path)):
        load(file, {})


def test_the_example_configurations_can_be_read() -> None:
    for file in sorted((Path(__file__).parents[2] / "examples").glob("*.yaml")):
        assert load(file, {}).models


# -- autoscaling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("{min_replicas: 3, max_replicas: 2}", "models[0].autoscaling.min_replicas: 3 must be 0 to `max_replicas`"),
        ("{min_replicas: 0, max_replicas: 0}", "models[0].autoscaling.max_replicas: 0 must be at least 1"),
        ("{min_replicas: 2}", "models[0].replicas: 1 must be `min_replicas` to `max_replicas`"),
        ("{attainment: 1.0}", "models[0].autoscaling.attainment: 1.0 must be 0.5 to 0.9999"),
        ("{attainment: .nan}", "models[0].autoscaling.attainment: nan must be 0.5 to 0.9999"),
        ("{ttft_slo_s: 0}", "models[0].autoscaling.ttft_slo_s: 0.0 must be more than 0"),
        ("{decode_tokens_per_s: -1}", "models[0].autoscaling.decode_tokens_per_s: -1.0 must be more than 0"),
        ("{start_up_s: -1}", "models[0].autoscaling.start_up_s: -1.0 must not be negative"),
        ("{max_replica: 2}", "unknown field `max_replica`"),
    ],
)
def test_autoscaling_that_cannot_be_is_told(tmp_path: Path, fields: str, said: str) -> None:
    assert said in error_of(tmp_path, f"models: [{{name: m, engine: scripted, autoscaling: {fields}}}]")


def test_the_autoscaler_is_set_from_the_environment_too(tmp_path: Path) -> None:
    found = load_text(tmp_path, MODEL, HEADRACE_AUTOSCALER__ADVISORY="true", HEADRACE_AUTOSCALER__GPUS="4")
    assert (found.autoscaler.advisory, found.autoscaler.gpus) == (True, 4.0)
    assert "autoscaler.period_s" in error_of(tmp_path, MODEL + "autoscaler: {period_s: 0}")
