"""Names of servers and of their objects."""

from __future__ import annotations

import pytest

from radixshmem import names


@pytest.mark.parametrize("name", ["/flexkv", "/a", "/_x", "/9", "/a.b-c_D", "/" + "x" * 80])
def test_names_that_a_server_may_have(name: str) -> None:
    assert names.check_name(name) == name
    assert names.check_object_name(names.default_data_name(name), "--data-name") == name + "_data"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "/",
            "flexkv",
            "/a/b",
            "/..",
            "/a..b",
            "/.a",
            "/-a",
            "/a b",
            "/a\n",
            "/" + "x" * 81,
            "/é",
            7,
            None,
        ),
        *("/x_data", "/x.sock", "/x.lock"),
    ],
)
def test_names_that_a_server_may_not_have(name: str) -> None:
    with pytest.raises(ValueError, match=r"^--name: "):
        names.check_name(name, "--name")


def test_objects_of_a_server() -> None:
    assert names.shm_path("/x") == "/dev/shm/x"
    assert names.default_data_name("/x") == "/x_data"
    assert names.lock_path("/x") == "/dev/shm/x.lock"
    assert names.default_endpoint("/x") == "unix:///dev/shm/x.sock"
    assert names.socket_path(names.default_endpoint("/x")) == "/dev/shm/x.sock"
    assert names.socket_path("unix:/tmp/s") == "/tmp/s"


@pytest.mark.parametrize(
    "endpoint",
    [
        *("", "/dev/shm/x.sock", "unix:x", "unix:///", "localhost:80", "unix:///" + "x" * 110),
        *("unix:///tmp/a%20b", "unix:///tmp/a?b", "unix:///tmp/a#b"),
    ],
)
def test_endpoints_that_are_no_socket(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"^--endpoint: "):
        names.socket_path(endpoint, "--endpoint")
