"""The AWS deployment: its form, its plan, its own tests, and an apply and a destroy against a simulated AWS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.infra.terraforming import SOURCE, TESTED, Terraform, simulated, simulated_aws
from tests.infra.tools import program, run

PASSWORDS = {user: [f"{user}-{'0123456789' * 3}"] for user in ("gateway", "worker", "scaler", "loader", "ops")}

LACKING = {  # what the simulated AWS has not: add-ons, ACLs and parameter groups; `terraform test` holds them
    "addons": {},
    "storage_addons": {},
    "deletion_protection": False,
    "broker": {"acl_name": "made-elsewhere", "parameter_group_name": "made-elsewhere"},
}

Resources = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def aws() -> Iterator[str]:
    with simulated_aws() as url:
        yield url


@pytest.fixture(scope="module", autouse=True)
def applied(tmp_path_factory: pytest.TempPathFactory, aws: str) -> Iterator[Future[Terraform]]:
    """An apply that goes on beside the other tests: it mostly waits."""

    def apply() -> Terraform:
        terraform = simulated(folder)
        terraform.init()
        terraform.simulate(aws)
        (terraform.folder / "it.auto.tfvars.json").write_text(json.dumps(LACKING), "utf-8")
        terraform("apply", "-input=false", "-no-color", "-auto-approve", timeout_s=400)
        return terraform

    folder = tmp_path_factory.mktemp("apply") / "terraform"
    with ThreadPoolExecutor() as pool:
        yield pool.submit(apply)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory, aws: str) -> Resources:
    """Every resource of the defaults, as planned, by its address."""
    terraform = Terraform(tmp_path_factory.mktemp("plan") / "terraform")
    terraform.init()
    terraform.simulate(aws)
    (terraform.folder / "it.auto.tfvars.json").write_text(json.dumps({"broker_passwords": PASSWORDS}), "utf-8")
    terraform("plan", "-input=false", "-no-color", "-out=it.plan")
    return _by_address(terraform.json("it.plan")["planned_values"]["root_module"])


def _by_address(module: dict[str, Any]) -> Resources:
    found = {each["address"]: each.get("values", {}) for each in module.get("resources", [])}
    for child in module.get("child_modules", []):
        found |= _by_address(child)
    return found


def test_the_files_are_formatted() -> None:
    run([program("terraform", "1.9 or newer"), "fmt", "-check", "-diff", "-recursive", SOURCE])


def test_every_variable_and_output_is_described() -> None:
    for file in [*SOURCE.rglob("variables.tf"), *SOURCE.rglob("outputs.tf")]:
        text = file.read_text("utf-8")
        blocks = text.count('\nvariable "') + text.count('\noutput "') + text.startswith(("variable", "output"))
        assert text.count("  description = ") == blocks, file


@pytest.mark.parametrize("at", TESTED)
def test_its_own_tests_pass(tmp_path: Path, at: str) -> None:
    terraform = Terraform(tmp_path / "terraform")
    terraform.init(at)
    if at == ".":  # it reads all modules
        terraform("validate", "-no-color")
    said = terraform("test", "-no-color", at=at)
    assert "Success!" in said and "0 failed" in said


@pytest.mark.parametrize("example", sorted(file.name for file in (SOURCE / "examples").glob("*.tfvars")))
def test_the_examples_can_be_planned(tmp_path: Path, aws: str, example: str) -> None:
    terraform = Terraform(tmp_path / "terraform")
    terraform.init()
    terraform.simulate(aws)
    terraform.env["TF_VAR_broker_passwords"] = json.dumps(PASSWORDS)
    assert "to add, 0 to change" in terraform("plan", "-input=false", "-no-color", f"-var-file=examples/{example}")


def test_the_plan_has_what_production_needs(planned: Resources) -> None:
    broker = planned["module.broker.aws_memorydb_cluster.this"]
    assert (broker["engine"], broker["tls_enabled"], broker["num_replicas_per_shard"]) == ("valkey", True, 2)
    assert len([address for address in planned if ".aws_subnet." in address]) == 9
    groups = {values["node_group_name"]: values for address, values in planned.items() if "eks_node_group" in address}
    assert groups["headrace-gpu-l4-batch"]["capacity_type"] == "SPOT"
    assert groups["headrace-cpu"]["scaling_config"][0]["min_size"] == 3


def test_no_security_group_lets_everybody_in(planned: Resources) -> None:
    rules = [values for address, values in planned.items() if "security_group_ingress_rule" in address]
    assert rules
    assert [rule for rule in rules if rule["cidr_ipv4"] or rule["cidr_ipv6"]] == []


def test_no_secret_is_in_the_plan_but_the_brokers_passwords(planned: Resources) -> None:
    assert [address for address in planned if "secret_version" in address or "random_password" in address] == []


def client(aws: str, service: str) -> Any:
    return boto3.client(
        service,
        endpoint_url=aws,
        region_name="eu-central-1",
        aws_access_key_id="simulated",
        aws_secret_access_key="simulated",
    )


def test_apply_makes_it_and_destroy_leaves_nothing(applied: Future[Terraform], aws: str) -> None:
    terraform = applied.result()
    eks, ec2, s3, memorydb = (client(aws, service) for service in ("eks", "ec2", "s3", "memorydb"))
    assert set(eks.list_nodegroups(clusterName="headrace")["nodegroups"]) == {
        "headrace-cpu",
        "headrace-gpu-l4",
        "headrace-gpu-l4-batch",
    }
    gpu = eks.describe_nodegroup(clusterName="headrace", nodegroupName="headrace-gpu-l4")["nodegroup"]
    assert gpu["labels"] == {"headrace/gpu-class": "l4"}
    assert gpu["taints"] == [{"key": "nvidia.com/gpu", "value": "present", "effect": "NO_SCHEDULE"}]
    outputs = json.loads(terraform("output", "-json"))
    bucket = outputs["weights_bucket"]["value"]
    assert s3.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"] == {
        "BlockPublicAcls": True,
        "IgnorePublicAcls": True,
        "BlockPublicPolicy": True,
        "RestrictPublicBuckets": True,
    }
    assert outputs["broker_url"]["value"].startswith("rediss://")
    assert outputs["service_account_roles"]["value"].keys() >= {"s3-csi", "prometheus", "external-secrets"}
    _ways_out_stay_in_their_zone(ec2)

    # the provider waits for five minutes before it first asks whether a MemoryDB cluster that it deletes is gone
    memorydb.delete_cluster(ClusterName="headrace")
    terraform("destroy", "-input=false", "-no-color", "-auto-approve", timeout_s=200)
    assert terraform.json().get("values", {}) == {}
    assert (eks.list_clusters()["clusters"], s3.list_buckets()["Buckets"]) == ([], [])
    assert [vpc for vpc in ec2.describe_vpcs()["Vpcs"] if not vpc["IsDefault"]] == []


def _ways_out_stay_in_their_zone(ec2: Any) -> None:
    zones = {each["SubnetId"]: each["AvailabilityZone"] for each in ec2.describe_subnets()["Subnets"]}
    gateways = {each["NatGatewayId"]: zones[each["SubnetId"]] for each in ec2.describe_nat_gateways()["NatGateways"]}
    ways = [
        (zones[link["SubnetId"]], gateways[route["NatGatewayId"]])
        for table in ec2.describe_route_tables()["RouteTables"]
        for route in table["Routes"]
        if "NatGatewayId" in route
        for link in table["Associations"]
        if "SubnetId" in link
    ]
    assert len(ways) == 3
    assert [way for way in ways if way[0] != way[1]] == []
