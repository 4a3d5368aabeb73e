"""What a job opens listens where it was told to, and nowhere else."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mindspeed_rl.launch import bootstrap
from mindspeed_rl.launch.bound_store import BoundStore, bind_address, bound_socket, main
from mindspeed_rl.launch.ray import open_store
from mindspeed_rl.rewards import ray_pool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/net")


def listening_on(port: int) -> set[str]:
    """Addresses of this machine on which a port is open, in hex as the kernel writes them."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            address, _, state = line.split()[1:4]
            host, _, number = address.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.add(host)
    return found


LOOPBACK = {"0100007F"}


@pytest.mark.parametrize("codes", [(2, 2), (2, -15), (1, 2), (-9, 1)])
def test_a_mistake_of_the_user_ends_the_launcher_without_its_report(
    monkeypatch: pytest.MonkeyPatch, codes: tuple[int, ...]
) -> None:
    """The rank has told it, and torchrun ends the others; of other failures it reports as ever."""
    failures = {
        rank: ProcessFailure(rank, 1000 + rank, code, error_file="")
        for rank, code in enumerate(codes)
    }

    def torchrun(*_: object, **__: object) -> None:
        raise ChildFailedError("entry", failures)

    monkeypatch.setattr("runpy.run_module", torchrun)
    monkeypatch.setattr("torch.distributed.TCPStore", None)
    with pytest.raises(SystemExit if codes[0] == 2 else ChildFailedError) as found:
        main()
    assert codes[0] != 2 or found.value.args == (2,)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_listens_on_its_address_alone(host: str) -> None:
    store = BoundStore(host, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    other = BoundStore(host, store.port)
    other.set("a", "1")
    assert store.get("a") == b"1"
    assert listening_on(store.port) == LOOPBACK


def test_the_store_of_a_driver_in_ray_listens_on_its_address() -> None:
    port, _ = open_store("127.0.0.1")
    assert listening_on(port) == LOOPBACK


def test_names_and_foreign_addresses_are_listened_to_as_before() -> None:
    """Nodes resolve a name for themselves; 192.0.2.1 stands for a translated address."""
    assert bind_address("head-node") == "" and bound_socket("head-node", 0) is None
    assert bind_address("192.0.2.1") == "192.0.2.1" and bound_socket("192.0.2.1", 0) is None


def test_a_port_that_is_taken_is_an_error_and_no_other_interface() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(RuntimeError, match="cannot listen"),
    ):
        BoundStore("127.0.0.1", taken.getsockname()[1], is_master=True)


@pytest.mark.parametrize(("local", "wanted"), [("4", "lo"), ("2", None)])
def test_gloo_of_one_node_stays_on_the_loopback(local: str, wanted: str | None) -> None:
    environ = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": local}
    bootstrap.set_defaults("cpu", environ)
    assert environ.get("GLOO_SOCKET_IFNAME") == wanted
    own = environ | {"GLOO_SOCKET_IFNAME": "eth7"}
    bootstrap.set_defaults("cpu", own)
    assert own["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize("address", ["", "10.0.0.1:6379"])
def test_a_pool_in_ray_joins_the_named_cluster_or_its_own(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never one that a file in /tmp names, which a stranger may have written."""
    asked: dict[str, Any] = {}
    ray = SimpleNamespace(is_initialized=lambda: False, init=lambda **given: asked.update(given))
    monkeypatch.setattr(ray_pool, "import_ray", lambda *text: ray)
    monkeypatch.setattr(ray_pool.RewardPool, "__init__", lambda *arguments: None)
    monkeypatch.setenv("RAY_ADDRESS", address)
    ray_pool.RayRewardPool(SimpleNamespace())  # type: ignore[arg-type]
    assert asked["address"] == (address or "local")
    assert asked.get("_node_ip_address") == (None if address else "127.0.0.1")
