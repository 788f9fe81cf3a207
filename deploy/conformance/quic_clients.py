"""`aioquic`, which shares no code with the gateway's QUIC, as a producer: ALPN `sluice/1`, frames of `sluice.v1`.

    quic_clients.py SLUICE_BINARY [--short] [TEST…]
"""

import asyncio
import datetime
import ipaddress
import json
import os
import re
import signal
import socket
import struct
import threading
import unittest
import unittest.mock

from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import (
    ConnectionTerminated,
    HandshakeCompleted,
    StopSendingReceived,
    StreamDataReceived,
    StreamReset,
)
from aioquic.quic.logger import QuicLogger
from aioquic.quic.packet import QuicErrorCode, QuicProtocolVersion
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from harness import TABLE, WAIT_SECONDS, Case, main, only_in_full

ALPN = "sluice/1"
OPEN, RECORDS, FINISH = 0x01, 0x02, 0x03
OPENED, ACK, REJECTED, MOVE, ERROR = 0x81, 0x82, 0x83, 0x84, 0x85
# Codes are HTTP's.
INVALID, UNAVAILABLE = 400, 503
# TLS's alert for no common ALPN, as QUIC carries alerts.
NO_APPLICATION_PROTOCOL = 0x100 + 120
MAX_EARLY_DATA = 0xFFFF_FFFF
# Above so many handshakes at one time clients have to prove their address.
HANDSHAKES_UNPROVEN_MAX = 64
# The size of the datagrams that every path has to carry, and the largest one that quinn tries.
DATAGRAM_BYTES, DATAGRAM_BYTES_MAX = 1200, 1452


def make_certificate(directory):
    """A certificate that is its own authority, and its key: their files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "conformance")])
    now = datetime.datetime.now(datetime.timezone.utc)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = os.path.join(directory, "gateway.crt"), os.path.join(directory, "gateway.key")
    with open(cert_file, "wb") as file:
        file.write(made.public_bytes(serialization.Encoding.PEM))
    # A key that others can read is refused.
    with open(os.open(key_file, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
        pem = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        file.write(key.private_bytes(*pem))
    return cert_file, key_file


def frame(kind, body):
    body = json.dumps(body).encode() if isinstance(body, dict) else body
    return struct.pack(">IB", 1 + len(body), kind) + body


def open_frame(**more):
    return frame(OPEN, {"table": TABLE, **more})


def records_frame(first, *records):
    payload = "\n".join(json.dumps(record) for record in records).encode()
    return frame(RECORDS, struct.pack(">QI", first, len(records)) + payload)


class Stream:
    """A bidirectional stream: what came on it, as frames and as events."""

    def __init__(self, client):
        self.client = client
        self.id = client._quic.get_next_available_stream_id()
        self.buffer = bytearray()
        self.came = asyncio.Queue()
        # Has to be known as used before the next one asks for an id.
        self.send(b"")

    def send(self, data, end=False):
        self.client._quic.send_stream_data(self.id, data, end)
        self.client.transmit()

    def take(self, event):
        if isinstance(event, StreamDataReceived):
            self.buffer += event.data
            while len(self.buffer) >= 4:
                (length,) = struct.unpack_from(">I", self.buffer)
                if len(self.buffer) < 4 + length:
                    break
                self.came.put_nowait((self.buffer[4], json.loads(self.buffer[5 : 4 + length])))
                del self.buffer[: 4 + length]
            if event.end_stream:
                assert not self.buffer, "FIN inside a frame"
                self.came.put_nowait(("fin", None))
        elif isinstance(event, StreamReset):
            self.came.put_nowait(("reset", event.error_code))
        elif isinstance(event, StopSendingReceived):
            self.came.put_nowait(("stop", event.error_code))

    async def next(self, *kinds):
        """The next of these kinds; others that come before it are passed over."""
        while True:
            kind, body = await asyncio.wait_for(self.came.get(), WAIT_SECONDS)
            if kind in kinds:
                return body
            unwanted = kind in (ERROR, "reset", "fin")
            assert not unwanted, f"{kind} {body} instead of {kinds}"

    async def opened(self, **more):
        self.send(open_frame(**more))
        return await self.next(OPENED)

    async def acked(self, offset, kind="durable"):
        while True:
            if (await self.next(ACK)).get(kind, -1) >= offset:
                return

    async def ends(self, *kinds):
        """What comes with the kinds that all have to come, in whichever order, before it is over."""
        bodies = {}
        while not bodies.keys() >= set(kinds):
            kind, body = await asyncio.wait_for(self.came.get(), WAIT_SECONDS)
            assert kind in kinds and kind not in bodies, f"{kind} {body} instead of {kinds}, after {bodies}"
            bodies[kind] = body
        return [bodies[kind] for kind in kinds]


class Client(QuicConnectionProtocol):
    """A connection, on a socket of its own on 127.0.0.1."""

    # Of so many datagrams one is lost, on the way there and on the way back. 0 for none.
    LOSE_EVERY = 0

    def __init__(self, connection):
        super().__init__(connection)
        self.streams = {}
        self.handshake = None
        self.terminated = asyncio.get_running_loop().create_future()
        self.datagrams = 0
        self.transports = []

    def connection_made(self, transport):
        self.transports.append(transport)
        super().connection_made(transport)

    def connection_lost(self, exc):
        """An old socket of a client that moved."""

    def datagram_received(self, data, addr):
        self.datagrams += 1
        if not self.LOSE_EVERY or self.datagrams % self.LOSE_EVERY:
            super().datagram_received(data, addr)

    def quic_event_received(self, event):
        if isinstance(event, HandshakeCompleted):
            self.handshake = event
        elif isinstance(event, ConnectionTerminated):
            if not self.terminated.done():
                self.terminated.set_result(event)
        elif isinstance(event, (StreamDataReceived, StreamReset, StopSendingReceived)):
            self.streams[event.stream_id].take(event)

    def stream(self):
        stream = Stream(self)
        self.streams[stream.id] = stream
        return stream

    async def bind(self):
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))

    async def end(self):
        self.close()
        await self.wait_closed()
        for transport in self.transports:
            transport.close()


class LossyClient(Client):
    LOSE_EVERY = 11


class Path(asyncio.DatagramProtocol):
    """One of the addresses of a client that moves on and on, and how many bytes went each way."""

    def __init__(self, client):
        self.client = client
        self.sent = self.heard = 0

    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, data, address):
        self.heard += len(data)
        # What comes to an address that was left is lost, as behind a NAT that has a new one.
        if self is self.client.path and not self.client.is_deaf:
            self.client.datagram_received(data, address)

    def sendto(self, data, address):
        self.sent += len(data)
        self.transport.sendto(data, address)

    def close(self):
        self.transport.close()


class Nomad(Client):
    """Moves to another port of this machine when it is told to."""

    is_deaf = False

    async def bind(self):
        _, self.path = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: Path(self), local_addr=("127.0.0.1", 0)
        )
        self.transports.append(self.path)
        self._transport = self.path


class Quic(unittest.IsolatedAsyncioTestCase, Case):
    async def asyncSetUp(self):
        # It makes a loop some times slower.
        asyncio.get_running_loop().set_debug(False)

    def start(self, **options):
        return super().start(settings=self.tls_settings(), **options)

    def tls_settings(self):
        self.authority, key_file = make_certificate(self.directory)
        return {"tls_cert": self.authority, "tls_key": key_file}

    def address(self, sluice):
        found = re.findall(r"gateway listens for QUIC address=([\d.]+):(\d+)", sluice.gateway.said())
        host, port = found[-1]
        return host, int(port)

    async def connect(self, sluice, kind=Client, wait=True, **options):
        configuration = QuicConfiguration(**{"is_client": True, "alpn_protocols": [ALPN], **options})
        configuration.load_verify_locations(self.authority)
        configuration.server_name = "localhost"
        tickets = []
        client = kind(QuicConnection(configuration=configuration, session_ticket_handler=tickets.append))
        client.tickets = tickets
        await client.bind()
        self.addAsyncCleanup(client.end)
        client.connect(self.address(sluice), transmit=wait)
        if wait:
            await asyncio.wait_for(client.wait_connected(), WAIT_SECONDS)
        return client

    async def end(self, sluice):
        # Without blocking the loop, which has to answer until the end.
        await asyncio.to_thread(sluice.end)

    async def feed(self, stream, numbers, at_once=10):
        """Sends numbers and ends in good order, all in the table."""
        opened = await stream.opened()
        for at in range(0, len(numbers), at_once):
            stream.send(records_frame(at, *({"id": number} for number in numbers[at : at + at_once])))
        stream.send(frame(FINISH, {"when": "committed"}), end=True)
        await stream.acked(len(numbers) - 1, "committed")
        await stream.next("fin")
        return opened["stream"]

    async def test_a_hundred_streams_on_a_connection(self):
        sluice = self.start()
        client = await self.connect(sluice)
        self.assertEqual(client.handshake.alpn_protocol, ALPN)
        parts = [range(30 * at, 30 * at + 30) for at in range(100)]
        ids = await asyncio.gather(*(self.feed(client.stream(), part) for part in parts))
        self.assertEqual(len(set(ids)), 100)
        await self.end(sluice)
        by_stream = dict(zip(ids, parts))
        for row in sluice.rows():
            self.assertEqual(row["id"], by_stream[row["_stream"]][row["_offset"]])
        self.assert_offsets(sluice.rows(), streams=100)

    @only_in_full
    async def test_of_two_pods_the_one_with_the_stream_is_drained_and_the_other_is_killed(self):
        pool = await asyncio.to_thread(self.start_pool, settings=self.tls_settings())
        client = await self.connect(pool)
        stream = client.stream()
        await stream.opened()
        sent = 0

        async def send_while(work):
            """Sends, each time until it is acked, for as long as `work` blocks its thread; answers what that answers."""
            nonlocal sent
            working = asyncio.create_task(asyncio.to_thread(work))
            while not working.done() or sent == 0:
                stream.send(records_frame(sent, *({"id": number} for number in range(sent, sent + 10))))
                sent += 10
                await stream.acked(sent - 1)
            return await working

        await send_while(lambda: None)
        first = (await asyncio.to_thread(pool.stream))["pod"]
        self.assertEqual(await send_while(lambda: pool.drain(first)), 0, "a drained pod's status")
        moved = await asyncio.to_thread(pool.stream)
        self.assertEqual((moved["moves"], moved["pod"] != first), (1, True))
        # The drained one is back before the other one goes, by `kill -9`.
        await send_while(lambda: pool.restart_pod(first))
        await send_while(lambda: pool.kill_pod(moved["pod"]))
        self.assertEqual((await asyncio.to_thread(pool.stream))["pod"], first)
        await send_while(lambda: pool.restart_pod(moved["pod"]))
        stream.send(frame(FINISH, {"when": "committed"}), end=True)
        await stream.acked(sent - 1, "committed")
        await stream.next("fin")
        await self.end(pool)
        self.assert_rows(pool, range(sent))

    @only_in_full
    async def test_more_streams_than_may_be_open_at_a_time(self):
        sluice = self.start()
        client = await self.connect(sluice)
        self.assertEqual(client._quic._remote_max_streams_bidi, 1000)
        numbers = range(1100)
        await asyncio.gather(*(self.feed(client.stream(), [number]) for number in numbers))
        await self.end(sluice)
        self.assertEqual(sorted(row["id"] for row in sluice.rows()), list(numbers))

    async def test_large_frames_within_the_windows(self):
        sluice = self.start()
        client = await self.connect(sluice)
        stream = client.stream()
        opened = await stream.opened()
        self.assertGreater(opened["frame_bytes_max"], 9 << 20)
        texts = ["x" * (9 << 20), "y" * 100, "z" * (5 << 20)]
        for at, text in enumerate(texts):
            stream.send(records_frame(at, {"id": at, "text": text}))
        stream.send(b"", end=True)
        # The end of the stream is an end in good order, like `finish`.
        await stream.acked(2)
        await stream.next("fin")
        await self.end(sluice)
        self.assertEqual([row["text"] for row in sluice.rows()], texts)

    async def test_a_named_stream_goes_on_over_another_connection(self):
        sluice = self.start()
        for first in (0, 50):
            client = await self.connect(sluice)
            stream = client.stream()
            opened = await stream.opened(name="loader")
            self.assertEqual(opened["next_offset"], first)
            stream.send(records_frame(first, *({"id": number} for number in range(first, first + 50))))
            await stream.acked(first + 49)
            # Without a word: what was acked is there.
            await client.end()
        await self.end(sluice)
        self.assert_rows(sluice, range(100))

    async def test_a_refused_record_is_named_and_the_others_go_on(self):
        sluice = self.start()
        sluice.create_table(("id", "int64"))
        stream = (await self.connect(sluice)).stream()
        await stream.opened()
        stream.send(records_frame(0, {"id": 0}, {"id": "one"}, {"id": 2}))
        rejected = await stream.next(REJECTED)
        self.assertEqual((rejected["offset"], rejected["column"], rejected["code"]), (1, "id", "wrong_type"))
        stream.send(frame(FINISH, {}), end=True)
        await stream.acked(2)
        await stream.next("fin")
        await self.end(sluice)
        self.assertEqual([(row["_offset"], row["id"]) for row in sluice.rows()], [(0, 0), (2, 2)])

    async def test_a_client_that_moves_goes_on(self):
        sluice = self.start()
        client = await self.connect(sluice)
        stream = client.stream()
        await stream.opened()
        stream.send(records_frame(0, *({"id": number} for number in range(100))))
        await stream.acked(99)
        # Another port of this machine; nothing is sent from, or heard on, the old one any more.
        ports = [client._transport.get_extra_info("sockname")[1]]
        await client.bind()
        client.transports[0].close()
        ports.append(client._transport.get_extra_info("sockname")[1])
        self.assertNotEqual(*ports)
        client.change_connection_id()
        stream.send(records_frame(100, *({"id": number} for number in range(100, 200))))
        await stream.acked(199)
        # And once more with the identifier that it has, as behind a NAT that forgot.
        await client.bind()
        client.transports[1].close()
        stream.send(records_frame(200, *({"id": number} for number in range(200, 300))))
        stream.send(frame(FINISH, {}), end=True)
        await stream.acked(299)
        await stream.next("fin")
        await self.end(sluice)
        self.assert_rows(sluice, range(300))

    async def test_a_client_that_moves_many_times_a_second_loses_nothing(self):
        moves, at_once = 150, 20
        sluice = self.start()
        client = await self.connect(sluice, kind=Nomad)
        other = asyncio.create_task(self.feed((await self.connect(sluice)).stream(), range(10_000, 11_000)))
        stream = client.stream()
        await stream.opened()
        for move in range(moves):
            first = move * at_once
            stream.send(records_frame(first, *({"id": number} for number in range(first, first + at_once))))
            # Some 60 a second.
            await asyncio.sleep(0.015)
            await client.bind()
            if move % 3 == 0:
                client.change_connection_id()
            client.transmit()
        stream.send(frame(FINISH, {"when": "committed"}), end=True)
        await stream.acked(moves * at_once - 1, "committed")
        await stream.next("fin")
        self.assertEqual(len(client.transports), moves + 1)
        # It is one connection, wherever it is.
        self.assertEqual(sluice.metric("sluice_gateway_connections"), 3)
        await other
        await self.end(sluice)
        rows = sluice.rows()
        self.assertEqual(sorted(row["id"] for row in rows), [*range(moves * at_once), *range(10_000, 11_000)])
        self.assert_offsets(rows, streams=2)

    async def test_addresses_that_prove_nothing_get_little(self):
        moves = 60
        sluice = self.start()
        client = await self.connect(sluice, kind=Nomad)
        stream = client.stream()
        await stream.opened()
        # From here on it sends from address after address, as one does who writes other people's into packets, and hears
        # nothing: none of them is ever proven.
        proven, client.is_deaf = client.path, True
        for move in range(moves):
            await client.bind()
            stream.send(records_frame(move * 10, *({"id": number} for number in range(move * 10, move * 10 + 10))))
            await asyncio.sleep(0.01)
        # Whatever was set off has come by then. From the last one it goes on sending again what nobody acks to it.
        await asyncio.sleep(1)
        unproven = [path for path in client.transports if path is not proven]
        self.assertEqual(len(unproven), moves)
        # RFC 9000, 8.1, allows three times what came from there. quinn begins a datagram while anything of that is left, and
        # measures a path's largest datagram beside it: so each may get one datagram more, and one of them a second.
        for path in unproven[:-1]:
            self.assertLessEqual(path.heard, 3 * path.sent + DATAGRAM_BYTES + DATAGRAM_BYTES_MAX)
        more = sum(max(0, path.heard - 3 * path.sent) for path in unproven[:-1])
        self.assertLessEqual(more, moves * DATAGRAM_BYTES + DATAGRAM_BYTES_MAX)
        self.assertTrue(any(path.heard for path in unproven), "nothing was asked of any of them")
        # And back to where it can hear.
        client.is_deaf = False
        await client.bind()
        stream.send(frame(FINISH, {}), end=True)
        await stream.acked(moves * 10 - 1)
        await stream.next("fin")
        await self.end(sluice)
        self.assert_rows(sluice, range(moves * 10))

    async def test_a_stream_beyond_those_that_are_allowed_ends_its_connection_alone(self):
        sluice = self.start()
        other = await self.connect(sluice)
        for number in (1000, (1 << 60) - 1):
            with self.subTest(number=number):
                client = await self.connect(sluice)
                client.stream()
                # What it was told counts for nothing.
                client._quic._remote_max_streams_bidi = 1 << 60
                client._quic.send_stream_data(4 * number, open_frame())
                client.transmit()
                ended = await asyncio.wait_for(client.terminated, WAIT_SECONDS)
                self.assertEqual(ended.error_code, QuicErrorCode.STREAM_LIMIT_ERROR, ended)
        await self.feed(other.stream(), range(10))
        await self.end(sluice)
        self.assert_rows(sluice, range(10))

    async def test_new_keys_and_new_connection_identifiers(self):
        sluice = self.start()
        client = await self.connect(sluice)
        stream = client.stream()
        await stream.opened()
        for at in range(0, 100, 10):
            stream.send(records_frame(at, *({"id": number} for number in range(at, at + 10))))
            await stream.acked(at + 9)
            if at % 20:
                client.request_key_update()
            else:
                client.change_connection_id()
            await asyncio.wait_for(client.ping(), WAIT_SECONDS)
        stream.send(b"", end=True)
        await stream.next("fin")
        await self.end(sluice)
        self.assert_rows(sluice, range(100))

    async def test_lost_datagrams_lose_no_records(self):
        sluice = self.start()
        client = await self.connect(sluice, kind=LossyClient)
        sends = client.transports[-1].sendto
        sent = 0

        def lossy(data, address):
            nonlocal sent
            sent += 1
            if sent % LossyClient.LOSE_EVERY:
                sends(data, address)

        client._transport = unittest.mock.Mock(sendto=lossy)
        await asyncio.gather(*(self.feed(client.stream(), range(at, at + 500)) for at in range(0, 2000, 500)))
        self.assertGreater(sent, 2 * LossyClient.LOSE_EVERY)
        await self.end(sluice)
        rows = sluice.rows()
        self.assertEqual(sorted(row["id"] for row in rows), list(range(2000)))
        self.assert_offsets(rows, streams=4)

    async def test_a_reset_ends_its_stream_and_no_other(self):
        sluice = self.start()
        client = await self.connect(sluice)
        reset, other = client.stream(), client.stream()
        await reset.opened()
        await other.opened()
        reset.send(records_frame(0, *({"id": number} for number in range(10))))
        await reset.acked(9)
        # In the middle of a frame.
        reset.send(records_frame(10, {"id": 10})[:-3])
        client._quic.reset_stream(reset.id, 77)
        client.transmit()
        self.assertEqual(await reset.ends("reset"), [UNAVAILABLE])
        other.send(records_frame(0, *({"id": number} for number in range(100, 110))))
        other.send(b"", end=True)
        await other.acked(9)
        await other.next("fin")
        await self.end(sluice)
        self.assertEqual(sorted(row["id"] for row in sluice.rows()), [*range(10), *range(100, 110)])

    async def test_a_producer_that_wants_no_answers_ends_its_stream_and_no_other(self):
        sluice = self.start()
        client = await self.connect(sluice)
        deaf, other = client.stream(), client.stream()
        await deaf.opened()
        await other.opened()
        deaf.send(records_frame(0, *({"id": number} for number in range(10))))
        await deaf.acked(9)
        client._quic.stop_stream(deaf.id, 77)
        client.transmit()
        # The gateway resets its half, and asks for no more of ours.
        self.assertEqual(await deaf.ends("reset", "stop"), [UNAVAILABLE, UNAVAILABLE])
        other.send(records_frame(0, *({"id": number} for number in range(100, 110))))
        other.send(b"", end=True)
        await other.acked(9)
        await other.next("fin")
        await self.end(sluice)
        self.assertEqual(sorted(row["id"] for row in sluice.rows()), [*range(10), *range(100, 110)])

    async def test_garbage_is_refused_by_name_and_ends_its_stream_alone(self):
        sluice = self.start()
        client = await self.connect(sluice)
        for what, data, end, code in [
            ("a length over the limit", b"\xff\xff\xff\xff", False, "record_too_large"),
            ("an unknown kind", frame(0x7F, {}), False, "unknown_frame_kind"),
            ("an empty frame", struct.pack(">I", 0), False, "empty_frame"),
            ("records before open", records_frame(0, {"id": 0}), False, "expected_open"),
            ("no JSON in open", frame(OPEN, b"\xff\xfe"), False, "invalid_frame"),
            ("an unknown key in open", open_frame(tabel="x"), False, "invalid_frame"),
            ("no table", frame(OPEN, {}), False, "missing_table"),
            ("nothing at all", b"", True, "expected_open"),
            ("half a frame", open_frame()[:-1], True, "truncated_frame"),
            ("records cut short", open_frame() + frame(RECORDS, b"\0" * 5), False, "truncated_frame"),
            ("a gap", open_frame() + records_frame(5, {"id": 5}), False, None),
            ("a count that is none", open_frame() + frame(RECORDS, struct.pack(">QI", 0, 9) + b"{}"), False, None),
            ("HTTP", b"GET / HTTP/1.1\r\n\r\n", False, "record_too_large"),
        ]:
            with self.subTest(what=what):
                stream = client.stream()
                stream.send(data, end)
                if data.startswith(open_frame()):
                    await stream.next(OPENED)
                # There is no more to be asked for of what has come to its end.
                error, *_, stop = await stream.ends(*([ERROR, "fin"] if end else [ERROR, "fin", "stop"]))
                self.assertEqual(error["kind"], "Invalid", error)
                if code:
                    self.assertEqual(error["code"], code, error)
                self.assertEqual(stop, None if end else INVALID)
        stream = client.stream()
        await self.feed(stream, range(10))
        await self.end(sluice)
        self.assert_rows(sluice, range(10))

    async def test_another_alpn_is_refused(self):
        sluice = self.start()
        for alpn in (["h3"], ["sluice/2", "sluice.v1"], None):
            with self.subTest(alpn=alpn):
                client = await self.connect(sluice, alpn_protocols=alpn, wait=False)
                client.transmit()
                ended = await asyncio.wait_for(client.terminated, WAIT_SECONDS)
                self.assertEqual(ended.error_code, NO_APPLICATION_PROTOCOL, ended)
        await self.feed((await self.connect(sluice)).stream(), range(3))

    async def test_an_unknown_version_is_negotiated(self):
        sluice = self.start()
        versions = [0x1A2A3A4A, QuicProtocolVersion.VERSION_1]
        client = await self.connect(sluice, original_version=versions[0], supported_versions=versions)
        self.assertEqual(client._quic._version, QuicProtocolVersion.VERSION_1)
        await self.feed(client.stream(), range(3))

    async def test_datagrams_and_streams_of_one_direction_are_off(self):
        sluice = self.start()
        client = await self.connect(sluice)
        self.assertIsNone(client._quic._remote_max_datagram_frame_size)
        self.assertEqual(client._quic._remote_max_streams_uni, 0)
        client._quic.send_datagram_frame(b"a datagram")
        client.transmit()
        ended = await asyncio.wait_for(client.terminated, WAIT_SECONDS)
        self.assertEqual(ended.error_code, QuicErrorCode.PROTOCOL_VIOLATION, ended)
        await self.feed((await self.connect(sluice)).stream(), range(3))

    async def test_early_data_is_refused_and_comes_once(self):
        sluice = self.start()
        client = await self.connect(sluice)
        await self.feed(client.stream(), range(10))
        await client.end()
        self.assertTrue(client.tickets, "no session ticket")
        ticket = client.tickets[-1]
        # It does not allow early data. This client sends some nevertheless.
        self.assertNotEqual(ticket.max_early_data_size, MAX_EARLY_DATA)
        ticket.max_early_data_size = MAX_EARLY_DATA
        log = QuicLogger()
        early = await self.connect(sluice, session_ticket=ticket, quic_logger=log, wait=False)
        stream = early.stream()
        feeding = asyncio.create_task(self.feed(stream, range(10, 20)))
        early.transmit()
        await feeding
        events = [event for trace in log.to_dict()["traces"] for event in trace["events"]]
        sent = [event["data"]["header"]["packet_type"] for event in events if event["name"].endswith("packet_sent")]
        self.assertIn("0RTT", sent)
        self.assertTrue(early.handshake.session_resumed)
        self.assertFalse(early.handshake.early_data_accepted)
        await self.end(sluice)
        self.assertEqual(sorted(row["id"] for row in sluice.rows()), list(range(20)))

    async def test_under_load_clients_prove_their_address_first(self):
        sluice = self.start()
        calm = await self.connect(sluice)
        self.assertEqual(calm._quic._retry_count, 0)
        # First packets of clients of which no more is heard.
        silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.addCleanup(silent.close)
        silent.bind(("127.0.0.1", 0))
        for _ in range(HANDSHAKES_UNPROVEN_MAX):
            configuration = QuicConfiguration(is_client=True, alpn_protocols=[ALPN], server_name="localhost")
            connection = QuicConnection(configuration=configuration)
            connection.connect(self.address(sluice), now=0)
            for data, address in connection.datagrams_to_send(now=0):
                silent.sendto(data, address)
        busy = await self.connect(sluice)
        self.assertEqual(busy._quic._retry_count, 1)
        await asyncio.gather(self.feed(busy.stream(), range(10)), self.feed(calm.stream(), range(10, 20)))

    async def test_noise_disturbs_nobody(self):
        sluice = self.start()
        client = await self.connect(sluice)
        feeding = asyncio.create_task(self.feed(client.stream(), range(1000)))
        noise = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.addCleanup(noise.close)
        noise.bind(("127.0.0.1", 0))
        for at in range(2000):
            # Some look like long headers, some like short ones, of version 1 or of none.
            start = [b"\xc3\0\0\0\1", b"\x40", b"\xff\xff\xff\xff\xff", b""][at % 4]
            noise.sendto(start + os.urandom(at % 1300), self.address(sluice))
        await feeding
        await self.end(sluice)
        self.assert_rows(sluice, range(1000))

    async def test_a_gateway_that_drains_says_move_and_acks_all(self):
        sluice = self.start()
        client = await self.connect(sluice)
        stream = client.stream()
        await stream.opened()
        stream.send(records_frame(0, *({"id": number} for number in range(10))))
        await stream.acked(9)
        draining = threading.Thread(target=sluice.gateway.end)
        draining.start()
        moving = await stream.next(MOVE)
        self.assertGreater(moving["after_ms"], 0)
        stream.send(records_frame(10, *({"id": number} for number in range(10, 20))))
        stream.send(frame(FINISH, {}), end=True)
        await stream.acked(19)
        await stream.next("fin")
        ended = await asyncio.wait_for(client.terminated, WAIT_SECONDS)
        self.assertEqual((ended.error_code, ended.reason_phrase), (UNAVAILABLE, "gateway_draining"))
        await asyncio.to_thread(draining.join, WAIT_SECONDS)
        self.assertEqual(sluice.gateway.child.returncode, 0)
        sluice.pod.end()
        self.assert_rows(sluice, range(20))

    async def test_a_pod_that_is_killed_goes_unseen(self):
        sluice = self.start()
        stream = (await self.connect(sluice)).stream()
        await stream.opened()
        for at in range(0, 100, 10):
            stream.send(records_frame(at, *({"id": number} for number in range(at, at + 10))))
            if at == 50:
                await asyncio.to_thread(sluice.restart_pod, signal.SIGKILL)
        stream.send(frame(FINISH, {"when": "committed"}), end=True)
        await stream.acked(99, "committed")
        await stream.next("fin")
        await self.end(sluice)
        self.assert_rows(sluice, range(100))


if __name__ == "__main__":
    main(__doc__)
