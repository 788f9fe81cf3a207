"""Autobahn's cases of WebSocket, run by `kosoku`, against an echo over the gateway's own socket.

    websocket_cases.py SLUICE_BINARY [--short]

Groups 1 to 7 and 10: framing, pings, reserved bits, opcodes, fragments, UTF-8, closes, automatic fragments. Not 9, which
measures speed, and 12 and 13, compression, which the gateway does not offer.
"""

import asyncio
import collections
import signal
import unittest

import harness
import kosoku

GROUPS = ["1", "2", "3", "4", "5", "6", "7", "10"]
# Autobahn's own count of them; fewer would be a run that left some out.
CASES = 247
CONFORMING = {"OK", "NON-STRICT", "INFORMATIONAL"}


class WebSocket(harness.Case):
    def test_autobahn(self):
        echo = harness.Process("echo", self.directory, harness.binary("examples/websocket_echo"))
        self.addCleanup(echo.end, signal.SIGKILL)
        results = asyncio.run(self.run_cases(echo.address))
        counted = collections.Counter((result.behavior.value, result.behavior_close.value) for result in results)
        for (behavior, close), count in sorted(counted.items()):
            print(f"\n  {count} cases: {behavior}, close {close}", end="")
        print()
        failed = [result for result in results if not self.conforms(result)]
        self.assertEqual([], [(one.case_id, one.behavior.value, one.behavior_close.value) for one in failed])
        self.assertEqual(len(results), CASES)

    async def run_cases(self, address):
        try:
            return await kosoku.run_fuzzingclient(f"ws://{address}", [f"{group}.*" for group in GROUPS])
        except kosoku.FailureError as failure:
            return failure.results

    def conforms(self, result):
        return result.behavior.value in CONFORMING and result.behavior_close.value in {"OK", "INFORMATIONAL"}


if __name__ == "__main__":
    harness.main(__doc__)
