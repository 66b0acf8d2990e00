"""What stands in the folders is what gets installed: what is not listed is missing from the wheel."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
ROOMS: dict[str, str] = SETUPTOOLS["package-dir"]


def folder_of(package: str) -> Path:
    room = next(room for room in ROOMS if package == room or package.startswith(room + "."))
    return ROOT / ROOMS[room] / package.removeprefix(room).lstrip(".").replace(".", "/")


def files_of_rooms() -> set[Path]:
    files = {file for folder in ROOMS.values() for file in (ROOT / folder).rglob("*") if file.is_file()}
    return {file for file in files if "__pycache__" not in file.parts}


def test_every_folder_with_python_files_is_a_listed_package() -> None:
    folders = {file.parent for file in files_of_rooms() if file.suffix == ".py"}
    listed = {folder_of(package) for package in SETUPTOOLS["packages"]}
    assert folders - listed == set()


def test_every_listed_package_is_a_folder() -> None:
    assert [package for package in SETUPTOOLS["packages"] if not folder_of(package).is_dir()] == []


def test_every_room_is_a_package_and_has_its_type_marker() -> None:
    assert [room for room in ROOMS if room not in SETUPTOOLS["packages"]] == []
    assert [room for room, folder in ROOMS.items() if not (ROOT / folder / "py.typed").exists()] == []


def test_every_file_that_is_no_python_is_package_data() -> None:
    patterns = SETUPTOOLS["package-data"]["*"]
    folders = [folder_of(package) for package in SETUPTOOLS["packages"]]
    listed = {file for folder in folders for pattern in patterns for file in folder.glob(pattern)}
    assert {file for file in files_of_rooms() if file.suffix != ".py"} - listed == set()


def test_type_checkers_find_every_room() -> None:
    for room, folder in ROOMS.items():
        assert (ROOT / ".typing" / room.replace(".", "/")).resolve() == ROOT / folder
