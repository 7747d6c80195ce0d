"""Valkey's failures, each on the real thing, with Redis in its place where that is what there is.

This engine stops at once: whatever a call ended with, nothing may come afterwards.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffloadd.agent.engines.resp import RespConnection, Server
from kvoffloadd.agent.engines.valkey import DEADLINE_S
from kvoffloadd.agentwire.frames import HEADER_BYTES, Code, Presence
from kvoffloadd.agentwire.names import KEPT_NAME
from kvoffloadd.testing.process import DaemonError
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.wait import throughout
from tests.remote.cluster import Cluster
from tests.remote.objects import MIB, Object, Places, get, put

pytestmark = pytest.mark.remote

QUIET_S = 3.0
NO, YES, UNKNOWN = Presence
LARGE = Object("kvo1/large", 1, (3 * MIB,))
SMALL = Object("kvo1/small", 2)
Make = Callable[..., Cluster]


def cut_in_the_middle(cluster: Cluster, spoil: Callable[[], None], heal: Callable[[], None]) -> None:
    """A get that is spoiled after its first bytes: it ends by itself, and nothing comes any more once all is well."""
    engine = cluster.engine()
    put(engine, LARGE)
    cluster.lab.slow(cluster.lab.hosts[2], "8mbit")
    places = Places(engine, [LARGE])
    call = engine.begin("get", places.wanted)
    until(lambda: not places.is_wiped(0), "the first bytes have come")
    spoil()
    assert call.result() == [Code.FAILED]
    assert call.seconds < DEADLINE_S + HANG_S
    places.wipe()
    heal()
    cluster.lab.fast(cluster.lab.hosts[2])
    throughout(lambda: places.is_wiped(0), "nothing writes there", QUIET_S)
    until(lambda: engine.exists(SMALL.name) != [UNKNOWN], "it is heard again")
    assert put(engine, SMALL) == [SMALL.size_bytes]
    assert get(engine, SMALL)[1].holds(0)


def test_a_link_is_cut_in_the_middle_of_a_get(make_isolated: Make) -> None:
    cluster = make_isolated("valkey")
    reader, _, server = cluster.lab.hosts
    cut_in_the_middle(cluster, lambda: cluster.lab.cut(reader, server), lambda: cluster.lab.mend(reader))


def test_the_server_dies_in_the_middle_of_a_get(make_isolated: Make) -> None:
    cluster = make_isolated("valkey")
    (server,) = cluster.stores
    cut_in_the_middle(cluster, server.kill, server.start)


def test_the_server_is_stopped_in_the_middle_of_a_get(make_isolated: Make) -> None:
    cluster = make_isolated("valkey")
    (server,) = cluster.stores
    cut_in_the_middle(cluster, server.pause, server.resume)


def test_a_link_too_slow_ends_at_the_deadline(make_isolated: Make) -> None:
    cluster = make_isolated("valkey")
    engine = cluster.engine(0, {"deadline_s": 1.0})
    put(engine, LARGE)
    cluster.lab.slow(cluster.lab.hosts[2], "8mbit")
    places = Places(engine, [LARGE, SMALL])
    assert engine.get(places.wanted) == [Code.FAILED, Code.FAILED]
    places.wipe()
    cluster.lab.fast(cluster.lab.hosts[2])
    throughout(lambda: places.is_wiped(0), "nothing writes there", QUIET_S)


def test_what_a_link_too_slow_has_brought_there_counts(make_isolated: Make) -> None:
    cluster = make_isolated("valkey")
    engine = cluster.engine(0, {"deadline_s": 2.0})
    cluster.lab.slow(cluster.lab.hosts[0], "8mbit")
    assert put(engine, SMALL, LARGE) == [SMALL.size_bytes, Code.FAILED]
    cluster.lab.fast(cluster.lab.hosts[0])
    assert get(engine, SMALL)[1].holds(0)
    assert put(engine, LARGE) == [LARGE.size_bytes]


def test_a_server_that_was_started_again_is_found_at_once(make_isolated: Make) -> None:
    """Connections of before are of no use, and callers do not notice."""
    cluster = make_isolated("valkey")
    (server,) = cluster.stores
    engine = cluster.engine()
    assert put(engine, SMALL) == [SMALL.size_bytes]
    server.kill()
    assert engine.exists(SMALL.name) == [UNKNOWN]
    assert get(engine, SMALL)[0] == put(engine, SMALL) == engine.call("remove", [SMALL.name]) == [Code.FAILED]
    assert engine.sweep("kvo1/") == Code.FAILED
    assert engine.call("write", "kvo1/w", b"x", if_absent=True, kept_s=None) == Code.FAILED
    server.start()
    assert engine.exists(SMALL.name) == [NO]
    assert put(engine, SMALL) == [SMALL.size_bytes]
    server.kill()
    server.start()
    assert get(engine, SMALL)[0] == [Code.MISS]


def test_objects_expire(start: Make) -> None:
    """All but what is kept, and put once more they are there for as long again."""
    engine = start().engine(0, {"ttl_s": 1.0})
    put(engine, SMALL)
    for kept_s in (3600.0, None):
        assert engine.call("write", f"kvo1/{kept_s}", b"x", if_absent=True, kept_s=kept_s) == 1
    names = [SMALL.name, "kvo1/3600.0", "kvo1/None"]
    until(lambda: engine.exists(*names) == [NO, YES, NO], "they have expired")
    assert get(engine, SMALL)[0] == [Code.MISS]
    assert put(engine, SMALL) == [SMALL.size_bytes]


def test_what_is_kept_goes_at_its_date_and_not_before(start: Make) -> None:
    """The server never evicts it, since it has no time to live. An engine that renews anything removes what is over by
    the server's clock.
    """
    cluster = start()
    engine = cluster.engine(0, {"ttl_s": 1.0})
    host, port = cluster.stores[0].place.split(":")
    server = RespConnection(Server(host, int(port)), time.monotonic() + HANG_S)
    for name, kept_s in (("kvo1/short", 1.0), ("kvo1/renewed", 1.0), ("kvo1/long", 3600.0)):
        assert engine.call("write", name, b"x", if_absent=True, kept_s=kept_s) == 1
        assert server.ask("TTL", name) == -1
    assert engine.call("renew", ["kvo1/renewed"], 3600.0) == [1]
    names = ["kvo1/short", "kvo1/renewed", "kvo1/long"]

    def short_is_gone() -> bool:
        assert engine.call("renew", ["kvo1/none"], 3600.0) == [0]
        return engine.exists(*names) == [NO, YES, YES]

    until(short_is_gone, "it is over")
    assert server.ask("ZSCORE", KEPT_NAME, "kvo1/short") is None
    assert server.ask("ZCARD", KEPT_NAME) == 2
    server.close()


def test_no_more_goes_at_once_than_takes_a_moment(start: Make) -> None:
    cluster = start()
    engine = cluster.engine()
    host, port = cluster.stores[0].place.split(":")
    server = RespConnection(Server(host, int(port)), time.monotonic() + HANG_S)
    words = [word for number in range(2500) for word in ("1", f"kvo1/{number}")]
    server.ask("ZADD", KEPT_NAME, *words)
    left = []
    while (count := server.ask("ZCARD", KEPT_NAME)) != 0:
        left.append(count)
        engine.call("renew", [], 1.0)
    assert left == [2500, 1500, 500]
    server.close()


def test_rights_that_are_missing_are_told_at_the_start(start: Make) -> None:
    """A user that was made for an older release has such rights."""
    rights = LEAST.replace(" +zrange", "")
    cluster = start("--user", *f"kvo on >secret {rights}".split(), "--user", "default", "off")
    with pytest.raises(DaemonError, match=r"EngineError \(operator\): .*refuses: NOPERM .*zrange"):
        cluster.engine(0, {"url": url(cluster, user="kvo:secret@")})


def test_a_server_that_may_not_evict(make_isolated: Make) -> None:
    """Full is full: the rest has no room, and what is there comes."""
    cluster = make_isolated("valkey", "--maxmemory-policy", "noeviction")
    engine = cluster.engine()
    objects = [Object(f"kvo1/{number}", number, (2 * MIB,)) for number in range(40)]
    codes = [code for each in objects for code in put(engine, each)]
    there = codes.index(Code.NO_SPACE)
    assert 10 < there < 40
    codes, places = get(engine, *objects[:there])
    assert codes == [HEADER_BYTES + 2 * MIB] * there
    assert all(map(places.holds, range(there)))
    assert engine.call("write", "kvo1/w", b"x" * 1000, if_absent=True, kept_s=None) in (1000, Code.NO_SPACE)


def test_a_server_that_may_only_be_read(make_isolated: Make) -> None:
    cluster = make_isolated("valkey", "--replicaof", "127.0.0.1", "1")
    engine = cluster.engine()
    assert put(engine, SMALL) == [Code.REFUSED]
    assert get(engine, SMALL)[0] == [Code.MISS]
    assert engine.call("write", "kvo1/w", b"x", if_absent=True, kept_s=None) == Code.REFUSED
    assert engine.call("remove", ["kvo1/w"]) == [Code.REFUSED]


# --- who may what: on the loopback device ---

LEAST = "~kvo1/* +touch +strlen +get +set +unlink +scan +time +zadd +zrange +zrem"
"""All that the engine needs."""
DOCUMENTED = f"{LEAST} +info +select"
"""As docs/OPERATIONS.md has it: it also tells the server's version and size, and uses other databases."""


@pytest.fixture
def start(make_loopback: Make) -> Make:
    """`start(*words)`: a cluster of the test's own whose server has these words in its command."""
    return lambda *words: make_loopback("valkey", *words)


def url(cluster: Cluster, scheme: str = "redis", user: str = "", path: str = "") -> str:
    return f"{scheme}://{user}{cluster.stores[0].place}{path}"


def test_the_documented_rights_are_these() -> None:
    document = (Path(__file__).parents[2] / "docs" / "OPERATIONS.md").read_text(encoding="utf-8")
    assert f"user kvoffloadd on >PASSWORD {DOCUMENTED}\n" in document


@pytest.mark.parametrize("rights", [LEAST, DOCUMENTED])
def test_a_user_with_a_password_and_no_other_rights(start: Make, tmp_path: Path, rights: str) -> None:
    cluster = start("--user", *f"kvo on >se:cret/1 {rights}".split(), "--user", "default", "off")
    secret = tmp_path / "password"
    secret.write_text("se:cret/1\n")
    path = "/0" if rights is LEAST else "/1"
    settings = {"url": url(cluster, user="kvo@", path=path), "password_file": str(secret)}
    engine = cluster.engine(0, settings)
    assert put(engine, SMALL) == [SMALL.size_bytes]
    assert get(engine, SMALL)[1].holds(0)
    assert engine.sweep("kvo1/") == 1
    assert put(engine, Object("others/1", 1)) == [Code.REFUSED]
    assert engine.exists("others/1", SMALL.name) == [UNKNOWN, NO]
    assert get(engine, Object("others/1", 1))[0] == [Code.REFUSED]
    in_url = cluster.engine(0, {"url": url(cluster, user="kvo:se%3Acret%2F1@")})
    assert in_url.exists(SMALL.name) == [NO]
    secret.write_text("wrong")
    for wrong in (settings, {"url": url(cluster)}):
        with pytest.raises(DaemonError, match=r"EngineError \(operator\): .*refuses"):
            cluster.engine(0, wrong)
    with pytest.raises(DaemonError, match=r"EngineError \(operator\): .*No such file"):
        cluster.engine(0, {**settings, "password_file": str(tmp_path / "none")})


def test_databases_do_not_meet(start: Make) -> None:
    cluster = start()
    first, second = (cluster.engine(0, {"url": url(cluster, path=path)}) for path in ("", "/5"))
    put(first, SMALL)
    assert second.exists(SMALL.name) == [NO]
    assert first.exists(SMALL.name) == [YES]


def test_a_cluster_is_refused_with_the_reason(start: Make) -> None:
    with pytest.raises(DaemonError, match=r"EngineError \(operator\): .*a cluster needs a proxy"):
        start("--cluster-enabled", "yes").engine()


@pytest.mark.parametrize(
    "wrong", ["http://127.0.0.1", "redis://", "127.0.0.1:6379", "redis://h:port", "redis://h/db", "unix://"]
)
def test_urls_that_cannot_be_right(start: Make, wrong: str) -> None:
    with pytest.raises(DaemonError, match=r"EngineError \(operator\): valkey.url"):
        start().engine(0, {"url": wrong})


def test_nobody_listens(start: Make) -> None:
    cluster = start()
    cluster.stores[0].kill()
    with pytest.raises(DaemonError, match=r"EngineError \(store\): .* does not answer"):
        cluster.engine()


def test_a_unix_socket(start: Make, socket_dir: Path) -> None:
    cluster = start("--unixsocket", str(socket_dir / "valkey.sock"))
    engine = cluster.engine(0, {"url": f"unix://{socket_dir}/valkey.sock"})
    assert put(engine, SMALL) == [SMALL.size_bytes]
    assert get(engine, SMALL)[1].holds(0)


# --- TLS ---


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem; server.pem and client.pem with their keys, signed by it; other.pem, another CA."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)

    for name in ("ca", "other"):
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
                "-addext", "keyUsage=critical,keyCertSign",
                "-keyout", f"{name}.key", "-out", f"{name}.pem")  # fmt: skip
    for name in ("server", "client"):
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
                "-addext", "subjectAltName=IP:127.0.0.4", "-addext", "basicConstraints=critical,CA:FALSE",
                "-CA", "ca.pem", "-CAkey", "ca.key", "-keyout", f"{name}.key", "-out", f"{name}.pem")  # fmt: skip
    return folder


def test_tls_with_certificates_of_both(start: Make, certificates: Path) -> None:
    at = certificates.joinpath
    files = ["--tls-cert-file", str(at("server.pem")), "--tls-key-file", str(at("server.key"))]
    cluster = start("--port", "0", "--tls-port", "PORT", *files, "--tls-ca-cert-file", str(at("ca.pem")))
    ours = {"cert_file": str(at("client.pem")), "key_file": str(at("client.key"))}
    settings = {"url": url(cluster, "rediss"), "ca_file": str(at("ca.pem")), **ours}
    engine = cluster.engine(0, settings)
    large = Object("kvo1/large", 1, (MIB, 2 * MIB, 100))
    assert put(engine, large, SMALL) == [large.size_bytes, SMALL.size_bytes]
    codes, places = get(engine, large, Object("kvo1/none", 1), SMALL)
    assert codes == [large.size_bytes, Code.MISS, SMALL.size_bytes]
    assert places.holds(0) and places.holds(2) and places.guards_stand()
    cluster.stores[0].kill()
    cluster.stores[0].start()
    assert get(engine, SMALL)[0] == [Code.MISS]
    for wrong in ({"ca_file": str(at("other.pem"))}, {"ca_file": ""}, {"cert_file": ""}, {"cert_file": "/none"}):
        with pytest.raises(DaemonError, match=r"EngineError \((operator|store)\)"):
            cluster.engine(0, {**settings, **wrong})


def test_a_call_that_is_given_up_is_bounded_by_its_deadline_alone(start: Make) -> None:
    """The bytes that come do not extend it: a server that trickles holds up no caller for longer."""
    cluster = start()
    engine = cluster.engine(0, {"deadline_s": 1.0})
    put(engine, SMALL)
    cluster.stores[0].pause()
    began = time.monotonic()
    assert engine.exists(SMALL.name) == [UNKNOWN]
    assert get(engine, SMALL)[0] == [Code.FAILED]
    assert time.monotonic() - began < HANG_S
    cluster.stores[0].resume()
    assert get(engine, SMALL)[1].holds(0)
