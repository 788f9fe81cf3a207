//! What the machine can do, measured in the same run as the bench: every figure is read beside its limit.
//!
//! *Owns*: bare disk, network, memory, decoding and Parquet, each alone on one core.
//! *Does not own*: the service's figures (`bench`).

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use arrow::array::RecordBatch;
use parquet::arrow::ArrowWriter;
use serde::{Deserialize, Serialize};
use sluice_pod::decode::arrow::ArrowDecoder;
use sluice_pod::decode::json::JsonDecoder;
use sluice_pod::decode::protobuf::ProtobufDecoder;
use sluice_pod::decode::rows::{BYTES_MAX, Rows};
use sluice_pod::table::parquet::properties;
use sluice_pod::threads::ask_for_real_time;
use sluice_shared::frame::{Encoding, UnknownFields};

use crate::bench::Feed;
use crate::bench::run::Quantiles;
use crate::workload;

/// How long a measurement of single steps runs.
const MEASURE: Duration = Duration::from_millis(1000);
/// Flushes under load take a scheduler tick each: fewer of them are enough for a median.
const FLUSHES_MAX: usize = 2000;
const DISK_FILE_BYTES: usize = 256 << 20;
const WRITE_BYTES: usize = 1 << 20;
/// Direct I/O wants memory and places aligned to this.
const ALIGN: usize = 4096;
const SOCKET_BYTES: usize = 256 << 10;
const COPY_BYTES: usize = 64 << 20;
/// As the pod writes: about what one flush of a busy table holds.
const PARQUET_BYTES: usize = 64 << 20;
const RECORD_BYTES_MAX: usize = 10 << 20;

/// What the machine can do.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Limits {
    /// The disk.
    pub disk: Disk,
    /// One TCP connection over loopback, MB/s.
    pub loopback_mb_per_s: f64,
    /// CPU time of its receiver.
    pub receive_cpu_s_per_gb: f64,
    /// Copying 64 MiB, MB/s.
    pub memcpy_mb_per_s: f64,
    /// Of the records of row (a).
    pub arrow: Codec,
    /// Of the records of row (b).
    pub json: Codec,
    /// Of the same records as protobuf messages.
    pub protobuf: Codec,
}

/// The disk, with direct I/O where the file system has it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Disk {
    /// Whether it was direct.
    pub direct: bool,
    /// Sequential writes of 1 MiB into a written file, MB/s.
    pub write_mb_per_s: f64,
    /// Their CPU time.
    pub write_cpu_s_per_gb: f64,
    /// Write and flush of 4 KiB into a written file, median, µs.
    pub flush_4k_us: f64,
    /// Of 64 KiB.
    pub flush_64k_us: f64,
    /// The same while every core is busy, by an ordinary thread.
    pub flush_4k_busy_us: f64,
    /// Of 64 KiB.
    pub flush_64k_busy_us: f64,
}

/// What one core does with one kind of records. Bytes are those of the payload, as it is sent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Codec {
    /// Payload bytes of a record.
    pub record_bytes: f64,
    /// Arrow bytes per payload byte: what the log and Parquet have to take.
    pub arrow_ratio: f64,
    /// Decoding, MB/s.
    pub decode_mb_per_s: f64,
    /// Decoding, records/s.
    pub decode_records_per_s: f64,
    /// Its CPU time.
    pub decode_cpu_s_per_gb: f64,
    /// Parquet with zstd 1, MB/s.
    pub parquet_mb_per_s: f64,
    /// Parquet with zstd 1, records/s.
    pub parquet_records_per_s: f64,
    /// Its CPU time.
    pub parquet_cpu_s_per_gb: f64,
    /// Writing the rows to disk.
    pub wal_cpu_s_per_gb: f64,
}

impl Codec {
    /// Decoding, log and Parquet done bare: what a pod cannot do without.
    pub fn bare_cpu_s_per_gb(&self) -> f64 {
        self.decode_cpu_s_per_gb + self.wal_cpu_s_per_gb + self.parquet_cpu_s_per_gb
    }
}

/// Measures everything, each part for about `lasts`. `dir` is on the disk to measure; the feeds are of Arrow, JSON and
/// protobuf.
///
/// # Errors
/// Anything that cannot be measured.
pub fn measure(dir: &Path, [arrow, json, protobuf]: [&Feed; 3], lasts: Duration) -> anyhow::Result<Limits> {
    let disk = disk(dir, lasts).with_context(|| format!("disk below {}", dir.display()))?;
    let loopback = loopback(lasts).context("loopback")?;
    Ok(Limits {
        loopback_mb_per_s: loopback.mb_per_s(),
        receive_cpu_s_per_gb: loopback.cpu_s_per_gb(),
        memcpy_mb_per_s: memcpy(lasts),
        arrow: codec(arrow, &disk, lasts).context("Arrow")?,
        json: codec(json, &disk, lasts).context("JSON")?,
        protobuf: codec(protobuf, &disk, lasts).context("protobuf")?,
        disk,
    })
}

/// What small steps cost when there is a pause before each: disks and cores that have gone to rest take longer than in a closed
/// loop.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Steps {
    /// Write and flush.
    pub flush: Quantiles,
    /// There and back over loopback TCP, between two threads that sleep meanwhile.
    pub round_trip: Quantiles,
}

/// Measures steps of `bytes`, one each `interval`, on the machine as it is now; with real-time priority where that is
/// granted, as the log's writers have it: else whatever else runs is measured along.
///
/// # Errors
/// Anything that cannot be measured.
pub fn steps(dir: &Path, bytes: usize, interval: Duration) -> anyhow::Result<Steps> {
    let target = Target::prepare(dir, MEASURE)?;
    let measured = std::thread::spawn(move || {
        ask_for_real_time();
        let flush = target.flush(bytes.next_multiple_of(ALIGN), interval)?;
        Ok(Steps { flush, round_trip: round_trip(bytes, interval)? })
    });
    measured.join().ok().context("the measuring thread panicked")?
}

fn disk(dir: &Path, lasts: Duration) -> anyhow::Result<Disk> {
    let target = Target::prepare(dir, lasts)?;
    let (write_mb_per_s, write_cpu_s_per_gb) = target.write()?;
    let flush = |bytes| target.flush(bytes, Duration::ZERO).map(|times| times.p50_ms * 1e3);
    let (flush_4k_us, flush_64k_us) = (flush(4 << 10)?, flush(64 << 10)?);
    let stop = Arc::new(AtomicBool::new(false));
    let cores = std::thread::available_parallelism()?.get();
    let spinners: Vec<_> = (0..cores).map(|_| spinner(Arc::clone(&stop))).collect();
    let busy = flush(4 << 10).and_then(|small| Ok((small, flush(64 << 10)?)));
    stop.store(true, Ordering::Relaxed);
    for spinner in spinners {
        // It cannot panic: it only counts.
        let _ = spinner.join();
    }
    let (flush_4k_busy_us, flush_64k_busy_us) = busy?;
    Ok(Disk {
        direct: target.direct,
        write_mb_per_s,
        write_cpu_s_per_gb,
        flush_4k_us,
        flush_64k_us,
        flush_4k_busy_us,
        flush_64k_busy_us,
    })
}

fn spinner(stop: Arc<AtomicBool>) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        while !stop.load(Ordering::Relaxed) {
            std::hint::spin_loop();
        }
    })
}

/// A written file, removed in the end.
struct Target {
    path: PathBuf,
    direct: bool,
    memory: Vec<u8>,
    lasts: Duration,
}

impl Target {
    fn prepare(dir: &Path, lasts: Duration) -> anyhow::Result<Self> {
        let path = dir.join("machine.bin");
        let mut target = Self { path, direct: true, memory: vec![0x5a; WRITE_BYTES + ALIGN], lasts };
        let mut file = File::create(&target.path)?;
        for _ in 0..DISK_FILE_BYTES / WRITE_BYTES {
            file.write_all(target.aligned(WRITE_BYTES))?;
        }
        file.sync_all()?;
        target.direct = target.open(libc::O_DIRECT).is_ok();
        Ok(target)
    }

    fn open(&self, flags: i32) -> std::io::Result<File> {
        let direct = if self.direct { libc::O_DIRECT } else { 0 };
        OpenOptions::new().write(true).custom_flags(flags | direct).open(&self.path)
    }

    fn aligned(&self, bytes: usize) -> &[u8] {
        let skip = self.memory.as_ptr().align_offset(ALIGN);
        &self.memory[skip..skip + bytes]
    }

    fn write(&self) -> anyhow::Result<(f64, f64)> {
        let mut file = self.open(0)?;
        let mut place = 0;
        let timed = timed(self.lasts, || {
            if place == DISK_FILE_BYTES {
                file.seek(SeekFrom::Start(0))?;
                place = 0;
            }
            file.write_all(self.aligned(WRITE_BYTES))?;
            place += WRITE_BYTES;
            Ok(WRITE_BYTES as u64)
        })?;
        file.sync_data()?;
        Ok((timed.mb_per_s(), timed.cpu_s_per_gb()))
    }

    fn flush(&self, bytes: usize, pause: Duration) -> anyhow::Result<Quantiles> {
        let mut file = self.open(libc::O_DSYNC)?;
        let started = Instant::now();
        let (mut times, mut place) = (Vec::new(), 0);
        while started.elapsed() < self.lasts && times.len() < FLUSHES_MAX {
            std::thread::sleep(pause);
            let before = Instant::now();
            file.write_all(self.aligned(bytes))?;
            times.push(before.elapsed());
            place += bytes;
            if place + bytes > DISK_FILE_BYTES {
                file.seek(SeekFrom::Start(0))?;
                place = 0;
            }
        }
        Ok(Quantiles::of(times))
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // A file that stays behind is in the bench's own directory, which goes as a whole.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn loopback(lasts: Duration) -> anyhow::Result<Timed> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let sender = std::thread::spawn(move || -> std::io::Result<()> {
        let mut socket = TcpStream::connect(address)?;
        let bytes = vec![7; SOCKET_BYTES];
        let started = Instant::now();
        while started.elapsed() < lasts {
            socket.write_all(&bytes)?;
        }
        Ok(())
    });
    let (mut socket, _) = listener.accept()?;
    let mut bytes = vec![0; SOCKET_BYTES];
    let (started, cpu, mut total) = (Instant::now(), thread_cpu()?, 0);
    loop {
        match socket.read(&mut bytes)? {
            0 => break,
            read => total += read as u64,
        }
    }
    let (wall, cpu) = (started.elapsed(), thread_cpu()?.saturating_sub(cpu));
    sender.join().ok().context("the sender panicked")??;
    Ok(Timed { bytes: total, wall, cpu })
}

/// `bytes` there, a few back.
fn round_trip(bytes: usize, pause: Duration) -> anyhow::Result<Quantiles> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut near = TcpStream::connect(listener.local_addr()?)?;
    let (mut far, _) = listener.accept()?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let echo = std::thread::spawn(move || {
        let mut received = vec![0; bytes];
        // Ends with the connection.
        while far.read_exact(&mut received).and_then(|()| far.write_all(&[1; 16])).is_ok() {}
    });
    let (sent, mut answer) = (vec![7; bytes], [0; 16]);
    let (started, mut times) = (Instant::now(), Vec::new());
    while started.elapsed() < MEASURE {
        std::thread::sleep(pause);
        let before = Instant::now();
        near.write_all(&sent)?;
        near.read_exact(&mut answer)?;
        times.push(before.elapsed());
    }
    drop(near);
    echo.join().ok().context("the echo panicked")?;
    Ok(Quantiles::of(times))
}

fn memcpy(lasts: Duration) -> f64 {
    let (from, mut to) = (vec![1; COPY_BYTES], vec![0; COPY_BYTES]);
    // The first touch of each page is dear, and not what is measured.
    to.copy_from_slice(&from);
    let (started, mut total) = (Instant::now(), 0);
    while started.elapsed() < lasts / 2 {
        std::hint::black_box(&mut to).copy_from_slice(std::hint::black_box(&from));
        total += COPY_BYTES;
    }
    total as f64 / 1e6 / started.elapsed().as_secs_f64()
}

fn codec(feed: &Feed, disk: &Disk, lasts: Duration) -> anyhow::Result<Codec> {
    let mut rows = Decoder::new(feed)?;
    let mut frames = feed.frames.iter().cycle();
    let decoded = timed(lasts, || {
        let frame = frames.next().context("no frames")?;
        std::hint::black_box(rows.decode(frame)?);
        Ok(frame.payload.len() as u64)
    })?;
    let mut batches = Vec::new();
    let (mut payload_bytes, mut records) = (0, 0u64);
    for frame in feed.frames.iter().cycle() {
        batches.extend(rows.decode(frame)?);
        payload_bytes += frame.payload.len();
        records += u64::from(frame.rows);
        if payload_bytes >= PARQUET_BYTES {
            break;
        }
    }
    let parquet = timed(lasts, || {
        parquet(&batches)?;
        Ok(payload_bytes as u64)
    })?;
    let slice_bytes = |batch: &RecordBatch| -> usize {
        let columns = batch.columns().iter();
        columns.map(|column| column.to_data().get_slice_memory_size().unwrap_or(0)).sum()
    };
    let arrow_bytes: usize = batches.iter().map(slice_bytes).sum();
    let record_bytes = payload_bytes as f64 / records as f64;
    let arrow_ratio = arrow_bytes as f64 / payload_bytes as f64;
    Ok(Codec {
        record_bytes,
        arrow_ratio,
        decode_mb_per_s: decoded.mb_per_s(),
        decode_records_per_s: decoded.mb_per_s() * 1e6 / record_bytes,
        decode_cpu_s_per_gb: decoded.cpu_s_per_gb(),
        parquet_mb_per_s: parquet.mb_per_s(),
        parquet_records_per_s: parquet.mb_per_s() * 1e6 / record_bytes,
        parquet_cpu_s_per_gb: parquet.cpu_s_per_gb(),
        wal_cpu_s_per_gb: disk.write_cpu_s_per_gb * arrow_ratio,
    })
}

/// The pod's own decoder of a feed's encoding, bare.
enum Decoder {
    Json(Box<JsonDecoder>),
    Arrow(ArrowDecoder),
    Protobuf(Box<(ProtobufDecoder, Rows)>),
}

impl Decoder {
    fn new(feed: &Feed) -> anyhow::Result<Self> {
        let schema = feed.shape.schema();
        Ok(match feed.encoding {
            Encoding::Json => {
                let decoder = JsonDecoder::new(schema, RECORD_BYTES_MAX).map_err(anyhow::Error::msg)?;
                Self::Json(Box::new(decoder))
            }
            Encoding::Arrow => Self::Arrow(ArrowDecoder::new(schema, 1 << 30)),
            Encoding::Avro => anyhow::bail!("no workload is Avro"),
            Encoding::Protobuf => {
                let descriptor = workload::descriptor(&schema)?;
                let decoder = ProtobufDecoder::new(&schema, &descriptor, UnknownFields::Refuse);
                let rows = Rows::new(schema, RECORD_BYTES_MAX).map_err(anyhow::Error::msg)?;
                Self::Protobuf(Box::new((decoder.map_err(anyhow::Error::msg)?, rows)))
            }
        })
    }

    fn decode(&mut self, frame: &crate::producer::Frame) -> anyhow::Result<Vec<RecordBatch>> {
        let mut refused = 0;
        let (rows, unknown) = (frame.rows as usize, UnknownFields::Refuse);
        let batches = match self {
            Self::Json(decoder) => {
                decoder.append(&frame.payload, unknown, &mut |_, _| refused += 1);
                vec![decoder.finish()]
            }
            Self::Protobuf(protobuf) => {
                let (decoder, rows) = &mut **protobuf;
                decoder.append_within(rows, &frame.payload, BYTES_MAX, &mut |_, _| refused += 1);
                vec![rows.finish()]
            }
            Self::Arrow(decoder) => decoder
                .decode(&frame.payload, rows, unknown, &mut |_, _| refused += 1)
                .map_err(anyhow::Error::msg)?,
        };
        anyhow::ensure!(refused == 0, "{refused} records of a frame were refused");
        Ok(batches)
    }
}

fn parquet(batches: &[RecordBatch]) -> anyhow::Result<()> {
    let first = batches.first().context("no batches")?;
    let properties = properties(first, batches.iter().map(RecordBatch::num_rows).sum())?;
    let mut writer = ArrowWriter::try_new(Vec::new(), first.schema(), Some(properties))?;
    for batch in batches {
        writer.write(batch)?;
    }
    std::hint::black_box(writer.into_inner()?);
    Ok(())
}

struct Timed {
    bytes: u64,
    wall: Duration,
    cpu: Duration,
}

impl Timed {
    fn mb_per_s(&self) -> f64 {
        self.bytes as f64 / 1e6 / self.wall.as_secs_f64()
    }

    fn cpu_s_per_gb(&self) -> f64 {
        self.cpu.as_secs_f64() / (self.bytes as f64 / 1e9)
    }
}

/// Does one step after the other for a while, after one that warms up. A step answers its bytes.
fn timed(lasts: Duration, mut step: impl FnMut() -> anyhow::Result<u64>) -> anyhow::Result<Timed> {
    step()?;
    let (started, cpu, mut bytes) = (Instant::now(), thread_cpu()?, 0);
    while started.elapsed() < lasts {
        bytes += step()?;
    }
    Ok(Timed { bytes, wall: started.elapsed(), cpu: thread_cpu()?.saturating_sub(cpu) })
}

/// CPU time of the calling thread.
fn thread_cpu() -> anyhow::Result<Duration> {
    let path = "/proc/thread-self/schedstat";
    let text = std::fs::read_to_string(path).context(path)?;
    let nanos = text.split(' ').next().context(path)?.parse().context(path)?;
    Ok(Duration::from_nanos(nanos))
}
