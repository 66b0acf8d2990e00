"""Terraform in a copy of `infra/terraform`, and a simulated AWS that it can be applied to."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.infra.tools import INFRA, missing, program, run
from tests.system.conftest import free_ports, until

SOURCE = INFRA / "terraform"
TESTED = [".", *sorted(str(folder.parent.relative_to(SOURCE)) for folder in SOURCE.glob("modules/*/tests"))]
"""The folders that have tests of their own."""

_PLUGIN_PLACES = ("/opt", "/usr/local/share/terraform", "/usr/share/terraform", "/usr/local/lib", "~/.terraform.d")
_SIMULATED = {  # the simulated cluster has no security group, and the broker lets in only whoever carries it
    "modules/cluster/simulated.tf": """
        data "aws_subnet" "first" { id = var.subnet_ids[0] }
        resource "aws_security_group" "simulated" { vpc_id = data.aws_subnet.first.vpc_id }
    """,
    "modules/cluster/simulated_override.tf": """
        output "security_group_id" { value = aws_security_group.simulated.id }
    """,
}


def plugin_folder() -> Path | None:
    """A folder of provider plugins that has the AWS provider, wherever this machine keeps it."""
    for place in map(Path, (os.path.expanduser(place) for place in _PLUGIN_PLACES)):
        for depth in range(1, 5):
            for found in place.glob("/".join(["*"] * depth) + "/hashicorp/aws"):
                return found.parents[2]
    return None


class Terraform:
    """A copy of the configuration to run terraform in."""

    def __init__(self, folder: Path, extra: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.env = {"TF_CLI_CONFIG_FILE": os.devnull, "CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1"}
        self._program = program("terraform", "see its own documentation; 1.9 or newer")
        shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*"))
        for name, text in (extra or {}).items():
            (folder / name).write_text(text, "utf-8")

    def __call__(self, *arguments: str, at: str = ".", timeout_s: float = 300) -> str:
        return run([self._program, *arguments], self.folder / at, self.env, timeout_s)

    def init(self, at: str = ".") -> None:
        plugins = plugin_folder()
        here = [f"-plugin-dir={plugins}"] if plugins else []
        try:
            self("init", "-input=false", "-backend=false", "-no-color", *here, at=at)
        except AssertionError:
            if plugins is None:
                missing("the AWS provider 5.100 in a plugin folder, or a network to get it from")
            raise

    def json(self, *arguments: str) -> Any:
        return json.loads(self("show", "-json", *arguments))

    def simulate(self, url: str) -> None:
        """Talk to a simulated AWS from now on."""
        self.env |= {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "simulated",
            "AWS_SECRET_ACCESS_KEY": "simulated",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def simulated(folder: Path) -> Terraform:
    """A copy that a simulated AWS can hold."""
    return Terraform(folder, _SIMULATED)


@contextlib.contextmanager
def simulated_aws() -> Iterator[str]:
    """A server that answers as AWS does, for as long as the block lasts."""
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask_cors") is None:
        missing("moto's server (pip install moto flask flask-cors)")
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env={**os.environ, "MOTO_IAM_LOAD_MANAGED_POLICIES": "true"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def is_up() -> bool:
        assert process.poll() is None, "the simulated AWS has ended"
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/moto-api/data.json", timeout=5).status_code == 200
        return False

    try:
        until(is_up, 60)
        yield url
    finally:
        process.terminate()
        process.wait(20)
