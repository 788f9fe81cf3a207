//! Fuzzing: what reads bytes that others wrote, or a disk kept, is run on bytes that nobody would write.
//!
//! A target is a function of an input. It panics where the service would, and where something does not hold that has to:
//! what is read is written as it was, each record is a row or refused, a log gives back a prefix of what was written. An
//! execution also may not ask for more memory than `memory_bytes` says.
//!
//! `make fuzz` runs each target for millions of inputs, guided by the code that they reach (`loadtest/fuzz`, where the kept
//! inputs are too). `make test` runs the kept ones, the seeds and some thousands that are like them. Checksums do not end an
//! input at the door: the log's are put right by the target where it forges, the others have none.
//!
//! *Owns*: the list of targets, their bounds.
//! *Does not own*: how inputs are found (libFuzzer, `mutate`), what is wrong with the service when one fails.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

pub mod draw;
pub mod memory;
pub mod mutate;
mod edges;
mod frames;
mod records;
mod stored;
mod tables;
mod wal;

/// What is fuzzed.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name: that of its program and of its directory of inputs.
    pub name: &'static str,
    /// Runs one input.
    pub run: fn(&[u8]),
    /// Inputs made by the service's own encoders.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Inputs are not made longer.
    pub input_bytes_max: usize,
    /// Bytes that an execution may hold, beside so many for each of its input's.
    pub memory_bytes: usize,
}

/// Bytes that an execution may hold for each byte of its input: a byte of JSON can be a node and some columns' values.
const MEMORY_PER_BYTE: usize = 512;

/// All of them.
pub const TARGETS: [Target; 12] = [
    target("wal_segments", wal::segments, wal::segment_seeds, 256, 4 << 20),
    target("wal_objects", wal::objects, wal::object_seeds, 1_024, 1 << 20),
    target("wal_batch", stored::batch, stored::batch_seeds, 8_192, 1 << 20),
    target("watermarks", stored::watermarks, stored::watermark_seeds, 4_096, 1 << 20),
    target("frames", frames::frames, frames::frame_seeds, 1_024, 1 << 20),
    target("json", records::json, records::json_seeds, 640, 8 << 20),
    target("arrow", records::arrow, records::arrow_seeds, 4_096, 8 << 20),
    target("protobuf", records::protobuf, records::protobuf_seeds, 2_048, 8 << 20),
    target("avro", records::avro, records::avro_seeds, 3_072, 8 << 20),
    target("posts", edges::posts, edges::post_seeds, 4_096, 4 << 20),
    target("otlp", edges::otlp, edges::otlp_seeds, 2_048, 8 << 20),
    target("tables", tables::tables, tables::table_seeds, 2_048, 8 << 20),
];

const fn target(
    name: &'static str,
    run: fn(&[u8]),
    seeds: fn() -> Vec<Vec<u8>>,
    input_bytes_max: usize,
    memory_bytes: usize,
) -> Target {
    Target { name, run, seeds, input_bytes_max, memory_bytes }
}

impl Target {
    /// The one of this name.
    pub const fn named(name: &str) -> Option<Self> {
        let mut place = 0;
        while place < TARGETS.len() {
            if is_equal(TARGETS[place].name, name) {
                return Some(TARGETS[place]);
            }
            place += 1;
        }
        None
    }

    /// Runs one input, and answers how many bytes it held.
    ///
    /// # Panics
    /// Where the target does, and where it holds more than it may.
    pub fn execute(&self, input: &[u8]) -> usize {
        let bytes = memory::peak_of(|| (self.run)(input));
        let most = self.memory_bytes + input.len() * MEMORY_PER_BYTE;
        assert!(bytes <= most, "{}: {bytes} bytes of memory, at most {most} may be held", self.name);
        bytes
    }

    /// The inputs that are kept in the repository, by file.
    ///
    /// # Errors
    /// Where they cannot be read.
    pub fn kept(&self) -> io::Result<Vec<(PathBuf, Vec<u8>)>> {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(self.name);
        let mut files =
            fs::read_dir(dir)?.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>()?;
        files.sort();
        files.into_iter().map(|file| fs::read(&file).map(|bytes| (file, bytes))).collect()
    }
}

/// As `==`, while a program is compiled: so that the code of its one target alone is in it.
const fn is_equal(one: &str, other: &str) -> bool {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    let mut place = 0;
    while place < one.len() && place < other.len() && one[place] == other[place] {
        place += 1;
    }
    place == one.len() && place == other.len()
}
