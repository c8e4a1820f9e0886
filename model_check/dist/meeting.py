"""Where the ranks of a job find each other."""

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from model_check.dist.peers import LOOK_S
from model_check.errors import ConfigError, PeerLost
from model_check.utils.interfaces import interface_to
from model_check.utils.worker_env import RankEnv

_RESOLVE_S = 5.0
_ATTEMPT_S = 1.0
_INTERFACE = "GLOO_SOCKET_IFNAME"


def open_store(env: RankEnv, timeout_s: float) -> Store:
    """Where the ranks find each other: rank 0 listens, or torchrun does. Until then the port is
    refused. Signals are heard meanwhile, as torch's own wait hears none. Raises PeerLost, and
    ConfigError for a port that somebody else has."""
    is_master = env.rank == 0 and not env.is_by_torchrun
    if not is_master:
        _refuse_unknown_name(env)
    until = time.monotonic() + timeout_s
    while not is_master and not _listens(env):
        if time.monotonic() > until:
            raise PeerLost(f"rank 0 did not come in {timeout_s:.0f} s", has_waited=True)
        time.sleep(LOOK_S)
    try:
        store = TCPStore(
            env.address,
            env.port,
            env.world_size,
            is_master=is_master,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=env.store_fd,
        )
    except dist.DistNetworkError as error:
        if not is_master:
            raise
        raise ConfigError(
            f"MASTER_PORT = {env.port}: rank 0 cannot listen there, since another program does, or "
            "may not; set it to a free port"
        ) from error
    return PrefixStore(f"attempt {env.attempt}", store)


def use_way_to(env: RankEnv) -> None:
    """gloo offers the others the address that this host's name means, which may be of another
    network, or of loopback: it is to use the interface that leads to rank 0, unless a person
    says which."""
    if _INTERFACE in os.environ or (found := interface_to(env.address, env.port)) is None:
        return
    os.environ[_INTERFACE] = found


def _refuse_unknown_name(env: RankEnv) -> None:
    """A name that no resolver knows now, nor in a while, is not worth the wait for rank 0. Raises
    ConfigError."""
    until = time.monotonic() + _RESOLVE_S
    while True:
        try:
            socket.getaddrinfo(env.address, env.port)
            return
        except socket.gaierror as error:
            if time.monotonic() > until:
                raise ConfigError(
                    f"MASTER_ADDR = {env.address}: this machine cannot resolve it "
                    f"({error.strerror}); torchrun takes the host name of the first node, or its "
                    "--local-addr"
                ) from error
            time.sleep(_ATTEMPT_S)


def _listens(env: RankEnv) -> bool:
    with suppress(OSError):
        socket.create_connection((env.address, env.port), timeout=_ATTEMPT_S).close()
        return True
    return False


def wait_for_all(store: Store, env: RankEnv, timeout_s: float) -> None:
    """A rank may never come; signals are heard. Raises PeerLost, and ConfigError where another job
    meets."""
    places = [f"model-check/{rank}" for rank in range(env.world_size)]
    until = time.monotonic() + timeout_s
    here = f"here {env.job}"
    if (
        env.rank > 0
        and _all_came(places[:1], store, until)
        and store.get(places[0]) != here.encode()
    ):
        raise ConfigError(
            f"MASTER_PORT = {env.port}: the ranks of another job meet there; set it to a free port"
        )
    store.set(places[env.rank], here)
    if not _all_came(places, store, until):
        there = [rank for rank, place in enumerate(places) if store.check([place])]
        said = f"of {env.world_size} ranks only {there} came in {timeout_s:.0f} s"
        raise PeerLost(said, has_waited=True)


def _all_came(places: list[str], store: Store, until: float) -> bool:
    while not store.check(places):
        if time.monotonic() > until:
            return False
        time.sleep(LOOK_S)
    return True
