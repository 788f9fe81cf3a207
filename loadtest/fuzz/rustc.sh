#!/bin/sh
# Cargo calls this in rustc's place: `rustc.sh RUSTC ARGUMENTS`. Crates that read bytes get libFuzzer's counters, by flags that
# stable Rust has; nothing else does, since each execution looks at all of them. What is built for the build itself (without
# `--target`) could not be linked with them.
case " $* " in
*" --target "*) ;;
*) exec "$@" ;;
esac
case " $* " in
*" --crate-name sluice_"* | *" --crate-name arrow_ipc "* | *" --crate-name arrow_data "* | \
    *" --crate-name arrow_schema "* | *" --crate-name simd_json "* | *" --crate-name serde_json "* | \
    *" --crate-name flatbuffers "* | *" --crate-name prost "* | *" --crate-name prost_types "*)
    exec "$@" -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
        -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
        -Cllvm-args=-sanitizer-coverage-trace-compares
    ;;
esac
exec "$@"
