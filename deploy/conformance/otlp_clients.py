"""OpenTelemetry's own exporters, unchanged, against Sluice: only the endpoint and the table are ours.

    otlp_clients.py SLUICE_BINARY [--short] [TEST…]

Each case starts a gateway and a pod of its own on free ports, and reads the Delta tables back with `deltalake`.
"""

import json
import logging
import os
import signal

import harness
from deltalake import DeltaTable
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.grpc import _log_exporter as grpc_logs
from opentelemetry.exporter.otlp.proto.grpc import metric_exporter as grpc_metrics
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_traces
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http import _log_exporter as http_logs
from opentelemetry.exporter.otlp.proto.http import metric_exporter as http_metrics
from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_traces
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from grpc import Compression as GrpcCompression

# The exporters log what the cases make go wrong on purpose.
logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

HEADER = "x-databricks-zerobus-table-name"
RESOURCE = Resource({"service.name": "shop", "host.cores": 4})
GRPC = {"logs": grpc_logs, "traces": grpc_traces, "metrics": grpc_metrics}
HTTP = {"logs": http_logs, "traces": http_traces, "metrics": http_metrics}
CLASSES = {"logs": "OTLPLogExporter", "traces": "OTLPSpanExporter", "metrics": "OTLPMetricExporter"}
TRANSPORTS = ("grpc", "http")


def exporter(transport, kind, address, table, compressed=False, timeout=30):
    headers = {HEADER: table} if table else None
    if transport == "grpc":
        compression = GrpcCompression.Gzip if compressed else None
        make = getattr(GRPC[kind], CLASSES[kind])
        return make(f"http://{address}", insecure=True, headers=headers, timeout=timeout, compression=compression)
    compression = Compression.Gzip if compressed else Compression.NoCompression
    make = getattr(HTTP[kind], CLASSES[kind])
    return make(f"http://{address}/v1/{kind}", headers=headers, timeout=timeout, compression=compression)


class Conformance(harness.Case):
    def rows(self, table):
        table = DeltaTable(os.path.join(self.directory, "tables", *table.split(".")))
        rows = table.to_pyarrow_table().to_pylist()
        return sorted(rows, key=lambda row: (row["_stream"], row["_offset"]))

    def flushed(self, provider):
        # Whether the exporter succeeded it does not say: the rows do.
        self.assertTrue(provider.force_flush(60_000), "not all was exported within a minute")
        provider.shutdown()

    def test_logs(self):
        sluice = self.start()
        for transport in TRANSPORTS:
            table = f"main.default.logs_{transport}"
            provider = LoggerProvider(resource=RESOURCE)
            made = exporter(transport, "logs", sluice.gateway.address, table, compressed=True)
            provider.add_log_record_processor(BatchLogRecordProcessor(made, max_export_batch_size=50))
            logger = provider.get_logger("shop.cart", "1.2")
            for number in range(200):
                logger.emit(
                    LogRecord(
                        timestamp=1_700_000_000_123_456_789 + number,
                        severity_number=SeverityNumber.WARN,
                        severity_text="WARN",
                        body={"n": number, "tags": ["a", True]} if number % 2 else f"n{number}",
                        attributes={"n": number, "ratio": 0.5, "word": "x"},
                    )
                )
            self.flushed(provider)
        sluice.end()
        for transport in TRANSPORTS:
            rows = self.rows(f"main.default.logs_{transport}")
            self.assertEqual(len(rows), 200)
            self.assertEqual(len({row["_stream"] for row in rows}), 1, "one stream for all exports")
            self.assertEqual([row["time_unix_nano"] - 1_700_000_000_123_456_789 for row in rows], list(range(200)))
            row = rows[7]
            self.assertEqual(json.loads(row["body"]), {"n": 7, "tags": ["a", True]})
            self.assertEqual(rows[8]["body"], "n8")
            self.assertEqual(dict(row["attributes"]), {"n": "7", "ratio": "0.5", "word": "x"})
            self.assertEqual((row["severity_number"], row["severity_text"]), (13, "WARN"))
            self.assertEqual(row["time"].microsecond, 123456)
            self.assertEqual((row["service_name"], dict(row["resource"]["attributes"])["host.cores"]), ("shop", "4"))
            scope = row["instrumentation_scope"]
            self.assertEqual((scope["name"], scope["version"]), ("shop.cart", "1.2"))

    def test_spans(self):
        sluice = self.start()
        for transport in TRANSPORTS:
            provider = TracerProvider(resource=RESOURCE)
            made = exporter(transport, "traces", sluice.gateway.address, f"main.default.spans_{transport}")
            provider.add_span_processor(BatchSpanProcessor(made))
            tracer = provider.get_tracer("shop")
            with tracer.start_as_current_span("outer", kind=SpanKind.SERVER) as outer:
                outer.add_event("halfway", {"percent": 50})
                outer.set_status(Status(StatusCode.ERROR, "no stock"))
                with tracer.start_as_current_span("inner") as inner:
                    inner.add_link(outer.get_span_context(), {"why": "test"})
            self.flushed(provider)
            trace_id = f"{outer.get_span_context().trace_id:032x}"
            outer_id = f"{outer.get_span_context().span_id:016x}"
            setattr(self, transport, (trace_id, outer_id))
        sluice.end()
        for transport in TRANSPORTS:
            trace_id, outer_id = getattr(self, transport)
            rows = {row["name"]: row for row in self.rows(f"main.default.spans_{transport}")}
            outer, inner = rows["outer"], rows["inner"]
            self.assertEqual((outer["trace_id"], outer["span_id"], outer["parent_span_id"]), (trace_id, outer_id, None))
            self.assertEqual((inner["trace_id"], inner["parent_span_id"]), (trace_id, outer_id))
            self.assertEqual((outer["kind"], inner["kind"]), ("SPAN_KIND_SERVER", "SPAN_KIND_INTERNAL"))
            self.assertEqual(outer["status"], {"code": "STATUS_CODE_ERROR", "message": "no stock"})
            self.assertEqual([event["name"] for event in outer["events"]], ["halfway"])
            self.assertEqual(dict(outer["events"][0]["attributes"]), {"percent": "50"})
            self.assertEqual(inner["links"][0]["span_id"], outer_id)
            self.assertLess(outer["start_time_unix_nano"], outer["end_time_unix_nano"])

    def test_metrics(self):
        sluice = self.start()
        for transport in TRANSPORTS:
            made = exporter(transport, "metrics", sluice.gateway.address, f"main.default.metrics_{transport}")
            reader = PeriodicExportingMetricReader(made, export_interval_millis=3_600_000)
            exponential = View(
                instrument_type=Histogram, instrument_name="sizes", aggregation=ExponentialBucketHistogramAggregation()
            )
            provider = MeterProvider([reader], resource=RESOURCE, views=[exponential])
            meter = provider.get_meter("shop")
            meter.create_counter("orders", unit="1").add(3, {"country": "se"})
            meter.create_gauge("heat").set(21.5)
            latency, sizes = meter.create_histogram("latency", unit="s"), meter.create_histogram("sizes")
            for value in (1, 20, 300):
                latency.record(value)
                sizes.record(value)
            self.assertTrue(provider.force_flush(60_000))
            provider.shutdown()
        sluice.end()
        for transport in TRANSPORTS:
            # The shutdown exports once more.
            rows = {row["name"]: row for row in reversed(self.rows(f"main.default.metrics_{transport}"))}
            orders = rows["orders"]
            self.assertEqual((orders["metric_type"], orders["value_int"], orders["value"]), ("sum", 3, 3.0))
            self.assertEqual((orders["is_monotonic"], dict(orders["attributes"])), (True, {"country": "se"}))
            self.assertEqual(orders["aggregation_temporality"], "AGGREGATION_TEMPORALITY_CUMULATIVE")
            heat = rows["heat"]
            self.assertEqual((heat["metric_type"], heat["value"], heat["value_int"]), ("gauge", 21.5, None))
            latency = rows["latency"]
            self.assertEqual((latency["metric_type"], latency["count"], latency["sum"]), ("histogram", 3, 321.0))
            self.assertEqual(sum(latency["bucket_counts"]), 3)
            self.assertEqual(len(latency["bucket_counts"]), len(latency["explicit_bounds"]) + 1)
            sizes = rows["sizes"]
            self.assertEqual((sizes["metric_type"], sizes["count"], sizes["max"]), ("exponential_histogram", 3, 300.0))
            self.assertEqual(sum(sizes["positive"]["bucket_counts"]), 3)
            self.assertGreater(sizes["scale"], 0)

    def test_a_table_from_the_configuration(self):
        os.environ["SLUICE_GATEWAY__OTLP_LOGS_TABLE"] = "telemetry.app.logs"
        self.addCleanup(os.environ.pop, "SLUICE_GATEWAY__OTLP_LOGS_TABLE")
        sluice = self.start(auto_create=False)
        provider = LoggerProvider(resource=RESOURCE)
        made = exporter("http", "logs", sluice.gateway.address, None)
        provider.add_log_record_processor(BatchLogRecordProcessor(made))
        provider.get_logger("x").emit(LogRecord(body="hello"))
        self.flushed(provider)
        sluice.end()
        self.assertEqual([row["body"] for row in self.rows("telemetry.app.logs")], ["hello"])

    def test_a_pod_that_is_killed_loses_nothing(self):
        sluice = self.start()
        providers = {}
        for transport in TRANSPORTS:
            provider = LoggerProvider(resource=RESOURCE)
            made = exporter(transport, "logs", sluice.gateway.address, f"main.default.kept_{transport}", timeout=60)
            processor = BatchLogRecordProcessor(
                made, schedule_delay_millis=20, max_export_batch_size=20, max_queue_size=100_000
            )
            provider.add_log_record_processor(processor)
            providers[transport] = provider
        records = 2000
        for number in range(records):
            for transport in TRANSPORTS:
                providers[transport].get_logger("x").emit(LogRecord(body=f"n{number}"))
            if number == 500:
                # Some are in the table, some on their way, some not sent.
                providers["grpc"].force_flush(60_000)
            if number in (700, 1400):
                sluice.pod.end(signal.SIGKILL)
                sluice.pod = sluice.start_pod(sluice.pod.address)
                self.addCleanup(sluice.pod.end, signal.SIGKILL)
        for transport in TRANSPORTS:
            self.flushed(providers[transport])
        sluice.end()
        for transport in TRANSPORTS:
            bodies = [row["body"] for row in self.rows(f"main.default.kept_{transport}")]
            # At least once is what exporters ask for; the gateway sends again by itself, so that none had to.
            self.assertEqual(bodies, [f"n{number}" for number in range(records)])


if __name__ == "__main__":
    harness.main(__doc__)
