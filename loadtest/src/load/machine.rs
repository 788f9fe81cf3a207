//! What this machine can do, for reports: the bench's limits, and what those leave out: UDP, check sums, and flushes by
//! several at one time.
//!
//! *Owns*: these measurements, which limit stands beside which figure.
//! *Does not own*: the bench's limits (`crate::machine`).

use std::fmt;
use std::fs::OpenOptions;
use std::net::UdpSocket;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use sluice_shared::frame::Encoding;

use super::report::{Run, number};
use crate::bench::Feed;
use crate::machine;
use crate::report::write_limits;
use crate::workload::Shape;

/// Each measurement of `loadtest machine`.
pub const LONG: Duration = Duration::from_secs(1);
/// And of a report that only wants something to compare with.
pub const SHORT: Duration = Duration::from_millis(150);
/// Encoded beforehand.
const FEED_BYTES: usize = 4 << 20;
/// Threads that write and flush at one time.
const DEPTHS: [usize; 4] = [1, 4, 16, 64];
const FLUSH_BYTES: usize = 4 << 10;
const ALIGN: usize = 4096;
const DATAGRAM_BYTES: usize = 1_400;
const CRC_BYTES: usize = 1 << 20;
/// A datagram that is lost is none that was received.
const UDP_TIMEOUT: Duration = Duration::from_millis(100);

/// What the machine can do.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Limits {
    /// Disk, TCP, memory, decoding, Parquet.
    pub base: machine::Limits,
    /// Datagrams of 1,400 B over loopback, from one thread to another, MB/s received.
    pub udp_mb_per_s: f64,
    /// CRC-32C on one core, MB/s.
    pub crc_mb_per_s: f64,
    /// Write and flush of 4 KiB, by how many do so at one time.
    pub flushes: Vec<Depth>,
}

/// Some threads that write and flush.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Depth {
    /// How many.
    pub depth: usize,
    /// Of each flush.
    pub p50_ms: f64,
    /// Of each flush.
    pub p99_ms: f64,
    /// All together.
    pub per_s: f64,
}

/// Measures everything, each part for about `lasts`. `dir` is on the disk to measure.
///
/// # Errors
/// Anything that cannot be measured.
pub fn measure(dir: &Path, lasts: Duration) -> anyhow::Result<Limits> {
    std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    let feed = |shape, encoding| Feed::of(shape, encoding, 1000, FEED_BYTES);
    let arrow = feed(Shape::Blob, Encoding::Arrow)?;
    let json = feed(Shape::ServiceEvent, Encoding::Json)?;
    let protobuf = feed(Shape::ServiceEvent, Encoding::Protobuf)?;
    let base = machine::measure(dir, [&arrow, &json, &protobuf], lasts)?;
    let flushes = DEPTHS.into_iter().map(|depth| flushes(dir, depth, base.disk.direct, lasts));
    Ok(Limits {
        flushes: flushes.collect::<anyhow::Result<_>>().context("flushes")?,
        udp_mb_per_s: udp(lasts).context("UDP over loopback")?,
        crc_mb_per_s: crc(lasts),
        base,
    })
}

impl Limits {
    /// How fast the machine is, in MB/s: for the limits of two reports to be told apart.
    pub(crate) fn speeds(&self) -> [(&'static str, f64); 5] {
        [
            ("disk in sequence", self.base.disk.write_mb_per_s),
            ("loopback TCP", self.base.loopback_mb_per_s),
            ("memory copy", self.base.memcpy_mb_per_s),
            ("JSON decode", self.base.json.decode_mb_per_s),
            ("Parquet encode", self.base.json.parquet_mb_per_s),
        ]
    }
}

/// Each thread has a file of its own, as pods have.
fn flushes(dir: &Path, depth: usize, is_direct: bool, lasts: Duration) -> anyhow::Result<Depth> {
    let one = |number: usize| -> anyhow::Result<Vec<f64>> {
        let path = dir.join(format!("flush-{number}.bin"));
        std::fs::write(&path, vec![0x5a; 64 * FLUSH_BYTES])?;
        let direct = if is_direct { libc::O_DIRECT } else { 0 };
        let file = OpenOptions::new().write(true).custom_flags(libc::O_DSYNC | direct).open(&path)?;
        file.sync_all()?;
        let memory = vec![0x5a; FLUSH_BYTES + ALIGN];
        let skip = memory.as_ptr().align_offset(ALIGN);
        let (began, mut times, mut place) = (Instant::now(), Vec::new(), 0);
        while began.elapsed() < lasts {
            let before = Instant::now();
            file.write_all_at(&memory[skip..skip + FLUSH_BYTES], (place % 64 * FLUSH_BYTES) as u64)?;
            times.push(before.elapsed().as_secs_f64() * 1e3);
            place += 1;
        }
        std::fs::remove_file(&path)?;
        Ok(times)
    };
    let times: Vec<anyhow::Result<Vec<f64>>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..depth).map(|number| scope.spawn(move || one(number))).collect();
        let joined =
            threads.into_iter().map(|thread| thread.join().ok().context("a thread panicked").flatten());
        joined.collect()
    });
    let mut all: Vec<f64> = times.into_iter().collect::<anyhow::Result<Vec<_>>>()?.concat();
    all.sort_by(f64::total_cmp);
    let at = |share: f64| all.get(((all.len() as f64) * share) as usize).copied().unwrap_or(f64::NAN);
    Ok(Depth { depth, p50_ms: at(0.5), p99_ms: at(0.99), per_s: all.len() as f64 / lasts.as_secs_f64() })
}

fn udp(lasts: Duration) -> anyhow::Result<f64> {
    let receiver = UdpSocket::bind("127.0.0.1:0")?;
    receiver.set_read_timeout(Some(UDP_TIMEOUT))?;
    let sender = UdpSocket::bind("127.0.0.1:0")?;
    sender.connect(receiver.local_addr()?)?;
    let sending = std::thread::spawn(move || -> std::io::Result<()> {
        let (datagram, began) = ([7; DATAGRAM_BYTES], Instant::now());
        while began.elapsed() < lasts {
            sender.send(&datagram)?;
        }
        Ok(())
    });
    let (mut datagram, mut received, began) = ([0; DATAGRAM_BYTES], 0, Instant::now());
    let mut last = began;
    // Ends when nothing more comes.
    while let Ok(bytes) = receiver.recv(&mut datagram) {
        received += bytes;
        last = Instant::now();
    }
    sending.join().ok().context("the sender panicked")??;
    Ok(received as f64 / 1e6 / last.duration_since(began).as_secs_f64().max(1e-9))
}

fn crc(lasts: Duration) -> f64 {
    let bytes = vec![0x5a; CRC_BYTES];
    let (began, mut total) = (Instant::now(), 0);
    while began.elapsed() < lasts {
        std::hint::black_box(crc32c::crc32c(std::hint::black_box(&bytes)));
        total += CRC_BYTES;
    }
    total as f64 / 1e6 / began.elapsed().as_secs_f64()
}

impl Limits {
    /// A run's figures in units of what the machine can do.
    pub fn beside(&self, run: &Run) -> String {
        let machine::Limits { disk, loopback_mb_per_s, json, arrow, .. } = &self.base;
        let mut text = String::new();
        if let Some(durable) = run.figure("payload durable") {
            let share = |limit: f64| format!("{:.1} %", durable / limit * 100.0);
            text += &format!(
                "payload durable, {} MB/s: {} of the disk in sequence, {} of loopback TCP, {} (JSON) or {} (Arrow) of one \
                 core's decoding, {} or {} of one core's Parquet\n",
                number(durable),
                share(disk.write_mb_per_s),
                share(*loopback_mb_per_s),
                share(json.decode_mb_per_s),
                share(arrow.decode_mb_per_s),
                share(json.parquet_mb_per_s),
                share(arrow.parquet_mb_per_s),
            );
        }
        for name in ["ack p50", "ack p99"] {
            if let Some(ack) = run.figure(name) {
                let flush = disk.flush_4k_us / 1e3;
                text += &format!(
                    "{name}, {} ms: {:.1} flushes of 4 KiB on the idle disk\n",
                    number(ack),
                    ack / flush
                );
            }
        }
        text
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_limits(f, &self.base)?;
        writeln!(
            f,
            "  loopback UDP {} MB/s; CRC-32C {} MB/s",
            number(self.udp_mb_per_s),
            number(self.crc_mb_per_s)
        )?;
        for Depth { depth, p50_ms, p99_ms, per_s } in &self.flushes {
            let per_s = number(per_s.round());
            writeln!(
                f,
                "  write + flush of 4 KiB by {depth}: p50 {p50_ms:.3} ms, p99 {p99_ms:.3} ms, {per_s} a second"
            )?;
        }
        Ok(())
    }
}
