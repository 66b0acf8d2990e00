"""SECURITY.md names what there is."""

from __future__ import annotations

import re

from headrace.api.access import access_of
from headrace.broker.settings import ApiSettings
from tests.infra.tools import ROOT

PAGE = (ROOT / "SECURITY.md").read_text("utf-8")


def test_every_file_that_it_names_is_there() -> None:
    named = re.findall(r"`((?:api|broker|docs|infra|tests|requirements)/[a-z0-9_./*-]+)`", PAGE)
    assert named and [name for name in named if not list(ROOT.glob(name.rstrip("/")))] == []


def test_what_it_calls_open_is_open_and_no_more() -> None:
    [row] = re.findall(r"\| anybody who reaches a pod \| (.*?) \| nothing \|", PAGE)
    assert all(access_of(path) == "open" for path in re.findall(r"`(/[a-z.]+)`", row))
    assert (access_of("/metrics"), access_of("/ops/x"), access_of("/v1/models")) == ("metrics", "admin", "use")


def test_the_settings_that_it_names_are_there() -> None:
    named = set(re.findall(r"`api\.([a-z_]+)`", PAGE))
    assert named and named <= set(ApiSettings.__struct_fields__)
