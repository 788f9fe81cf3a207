//! The log's directory: its lock, its identity, its segments' files, and how bytes get onto stable storage.
//!
//! *Owns*: every system call on the log's files; direct I/O and its fall-back.
//! *Does not own*: what is written where and when (`writer.rs`, `keeper.rs`, `replay.rs`).

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use sluice_shared::fault::{self, Bug, Faults, Point};
use sluice_shared::ids::WalPosition;

use super::WalError;
use super::bounds::{Bounds, SLOT, Slot};
use super::identity::Identity;
use super::segment::{BLOCK, SegmentHeader};

/// Groups that may be on their way at once; each writer has a file handle of its own, since the kernel reports a
/// failed write-back once per handle.
pub(super) const WRITERS: usize = 2;
/// Zeros are written in pieces of this.
const ZERO_CHUNK: usize = 1 << 20;
const IDENTITY: &str = "identity";
const IDENTITY_NEW: &str = "identity.new";
const LOCK: &str = "lock";
const PROBE: &str = "probe.tmp";
const OLDEST: &str = "oldest";

/// The directory of an open log.
pub(super) struct Disk {
    dir: PathBuf,
    directory: File,
    direct: bool,
    lock: Mutex<Option<File>>,
    /// As the file `oldest` says it.
    slot: Mutex<Slot>,
    /// What is to go wrong on purpose.
    pub(super) faults: Faults,
    /// A fuzzer's segments, read in the place of files.
    #[cfg(debug_assertions)]
    made_up: Option<BTreeMap<u64, Vec<u8>>>,
}

/// What the directory holds.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// Segments and their files' lengths.
    pub(super) segments: BTreeMap<u64, u64>,
    /// Numbers of the spare files, and their lengths.
    pub(super) spares: BTreeMap<u64, u64>,
}

/// A segment that is open for writing.
pub(super) struct SegmentFile {
    pub(super) number: u64,
    path: PathBuf,
    handles: [File; WRITERS],
    direct: bool,
    faults: Faults,
}

/// Memory that starts at a block's edge, as direct I/O wants it.
pub(super) struct AlignedBuffer {
    memory: Vec<u8>,
    start: usize,
}

impl AlignedBuffer {
    /// `bytes` zeros.
    pub(super) fn zeroed(bytes: usize) -> Self {
        let memory = vec![0; bytes + BLOCK];
        let start = memory.as_ptr().align_offset(BLOCK);
        Self { memory, start }
    }

    pub(super) fn capacity(&self) -> usize {
        self.memory.len() - BLOCK
    }

    pub(super) fn bytes(&self, bytes: usize) -> &[u8] {
        &self.memory[self.start..self.start + bytes]
    }

    pub(super) fn bytes_mut(&mut self, bytes: usize) -> &mut [u8] {
        &mut self.memory[self.start..self.start + bytes]
    }
}

fn io_error<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> WalError + 'a {
    move |source| WalError::Io { action, path: path.to_owned(), source }
}

impl Disk {
    /// Makes the directory where it does not exist, locks it, and finds out how it can be written.
    pub(super) fn open(dir: &Path, direct_io: bool) -> Result<Self, WalError> {
        create_directory(dir)?;
        let lock = take_lock(dir)?;
        let directory = File::open(dir).map_err(io_error("open directory", dir))?;
        let direct = direct_io && takes_direct_io(&dir.join(PROBE))?;
        Ok(Self {
            dir: dir.to_owned(),
            directory,
            direct,
            lock: Mutex::new(Some(lock)),
            slot: Mutex::default(),
            faults: Faults::default(),
            #[cfg(debug_assertions)]
            made_up: None,
        })
    }

    /// A log whose segments are in memory: they can be listed and loaded, and nothing else. It is to be opened some hundred
    /// thousand times a second.
    #[cfg(debug_assertions)]
    pub(super) fn made_up(segments: BTreeMap<u64, Vec<u8>>) -> Result<(Self, Listing), WalError> {
        let dir = Path::new("/");
        let lengths = segments.iter().map(|(number, bytes)| (*number, bytes.len() as u64)).collect();
        let disk = Self {
            dir: dir.to_owned(),
            directory: File::open(dir).map_err(io_error("open directory", dir))?,
            direct: false,
            lock: Mutex::new(None),
            slot: Mutex::default(),
            faults: Faults::default(),
            made_up: Some(segments),
        };
        Ok((disk, Listing { segments: lengths, ..Listing::default() }))
    }

    pub(super) fn direct(&self) -> bool {
        self.direct
    }

    /// Lets another open the log.
    pub(super) fn unlock(&self) {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    pub(super) fn identity_path(&self) -> PathBuf {
        self.dir.join(IDENTITY)
    }

    pub(super) fn segment_path(&self, number: u64) -> PathBuf {
        self.dir.join(format!("{number:020}.wal"))
    }

    fn spare_path(&self, number: u64) -> PathBuf {
        self.dir.join(format!("spare-{number}.wal"))
    }

    /// Segments and spares. Files of other names are none of ours.
    pub(super) fn list(&self) -> Result<Listing, WalError> {
        let error = || io_error("list", &self.dir);
        let mut listing = Listing::default();
        for entry in std::fs::read_dir(&self.dir).map_err(error())? {
            let entry = entry.map_err(error())?;
            let name = entry.file_name();
            let Some(stem) = name.to_str().and_then(|name| name.strip_suffix(".wal")) else { continue };
            let (files, digits) = match stem.strip_prefix("spare-") {
                Some(digits) => (&mut listing.spares, digits),
                None => (&mut listing.segments, stem),
            };
            if let Ok(number) = digits.parse() {
                files.insert(number, entry.metadata().map_err(error())?.len());
            }
        }
        Ok(listing)
    }

    /// None where there is no log yet.
    pub(super) fn read_identity(&self) -> Result<Option<Identity>, WalError> {
        identity_in(&self.dir)
    }

    pub(super) fn bounds_path(&self) -> PathBuf {
        self.dir.join(OLDEST)
    }

    /// Which segments have to be there; or why that is not known.
    pub(super) fn read_bounds(&self) -> Result<Result<Bounds, &'static str>, WalError> {
        let path = self.bounds_path();
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Err("it is missing")),
            Err(error) => return Err(io_error("read", &path)(error)),
        };
        let (newest, is_damaged) = Slot::newest(&bytes);
        if let Some(newest) = newest {
            *self.slot.lock().unwrap_or_else(PoisonError::into_inner) = newest;
        }
        Ok(match newest {
            Some(newest) if !is_damaged => Ok(newest.bounds),
            None if !is_damaged => Err("it is empty"),
            _ => Err("it does not match its checksum"),
        })
    }

    /// Says durably which segments have to be there from now on. In place, so that a full disk is no hindrance.
    pub(super) fn change_bounds(&self, change: impl FnOnce(&mut Bounds)) -> Result<(), WalError> {
        let path = self.bounds_path();
        let mut slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = Slot { turn: slot.turn + 1, ..*slot };
        change(&mut next.bounds);
        let write = || -> io::Result<()> {
            self.faults.hit(Point::WalMark, WalPosition { segment: 0, offset: 0 })?;
            let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path)?;
            // Of one that was cut the rest stays: it may be what counts, and a half of zeros is damage later on.
            let length = file.metadata()?.len();
            let is_new = length < 2 * SLOT as u64;
            if is_new {
                file.write_all_at(&[0; 2 * SLOT][usize::try_from(length).unwrap_or(0)..], length)?;
            }
            file.write_all_at(&next.encode(), next.turn % 2 * SLOT as u64)?;
            file.sync_data()?;
            if is_new { self.directory.sync_all() } else { Ok(()) }
        };
        write().map_err(io_error("write", &path))?;
        *slot = next;
        Ok(())
    }

    /// Replaces the identity durably and as a whole.
    pub(super) fn write_identity(&self, identity: &Identity) -> Result<(), WalError> {
        let new = self.dir.join(IDENTITY_NEW);
        let write = || -> io::Result<()> {
            std::fs::write(&new, identity.encode())?;
            File::open(&new)?.sync_all()?;
            std::fs::rename(&new, self.identity_path())?;
            self.directory.sync_all()
        };
        write().map_err(io_error("write", &self.identity_path()))
    }

    /// Reads a whole segment into `bytes`.
    pub(super) fn load(&self, number: u64, bytes: &mut Vec<u8>) -> Result<(), WalError> {
        bytes.clear();
        #[cfg(debug_assertions)]
        if let Some(segments) = &self.made_up {
            bytes.extend_from_slice(segments.get(&number).map_or(&[], Vec::as_slice));
            return Ok(());
        }
        let path = self.segment_path(number);
        let read = File::open(&path).and_then(|mut file| file.read_to_end(bytes));
        read.map(|_| ()).map_err(io_error("read", &path))
    }

    /// Puts onto stable storage what a segment holds, whoever has written it.
    pub(super) fn flush(&self, number: u64) -> Result<(), WalError> {
        let path = self.segment_path(number);
        let flushed = self.faults.hit(Point::WalFlushBefore, WalPosition { segment: number, offset: 0 });
        let flushed = flushed.and_then(|()| File::open(&path)).and_then(|file| file.sync_all());
        flushed.map_err(io_error("flush", &path))
    }

    /// Reads `length` bytes at a position; fewer where the file ends before.
    pub(super) fn read(&self, position: WalPosition, length: usize) -> Result<Bytes, WalError> {
        let path = self.segment_path(position.segment);
        let error = || io_error("read", &path);
        let file = self.options().read(true).open(&path).map_err(error())?;
        let skipped = position.offset % BLOCK as u64;
        let skip = usize::try_from(skipped).expect("less than a block");
        let span = (skip + length).next_multiple_of(BLOCK);
        let mut buffer = AlignedBuffer::zeroed(span);
        let mut filled = 0;
        while filled < skip + length {
            let at = position.offset - skipped + filled as u64;
            match file.read_at(&mut buffer.bytes_mut(span)[filled..], at) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(failed) if failed.kind() == ErrorKind::Interrupted => {}
                Err(failed) => return Err(error()(failed)),
            }
        }
        let (from, to) = (skip.min(filled), (skip + length).min(filled));
        let start = buffer.start;
        Ok(Bytes::from(buffer.memory).slice(start + from..start + to))
    }

    /// Makes a spare file of written blocks: a write into blocks that were only allocated costs a journal commit.
    pub(super) fn create_spare(&self, spare: u64, bytes: u64) -> Result<(), WalError> {
        let path = self.spare_path(spare);
        let nowhere = WalPosition { segment: 0, offset: 0 };
        let created = self.faults.hit(Point::WalCreate, nowhere);
        let created = created.and_then(|()| self.write_zeros(&path, bytes));
        if created.is_err() {
            // What was written of it must not take the room that is missing.
            let _ = std::fs::remove_file(&path);
        }
        created.map_err(io_error("make", &path))
    }

    fn write_zeros(&self, path: &Path, bytes: u64) -> io::Result<()> {
        let mut options = OpenOptions::new();
        if self.direct {
            options.custom_flags(libc::O_DIRECT);
        }
        let file = options.write(true).create(true).truncate(true).open(path)?;
        let zeros = AlignedBuffer::zeroed(ZERO_CHUNK);
        let mut at = 0;
        while at < bytes {
            let chunk = usize::try_from(bytes - at).unwrap_or(usize::MAX).min(ZERO_CHUNK);
            file.write_all_at(zeros.bytes(chunk), at)?;
            at += chunk as u64;
        }
        file.sync_all()
    }

    /// Makes a spare file a segment, durably, with its header, and opens it.
    pub(super) fn adopt_spare(&self, spare: u64, header: &SegmentHeader) -> Result<SegmentFile, WalError> {
        let (from, path) = (self.spare_path(spare), self.segment_path(header.segment));
        let open = || self.options().write(true).open(&from);
        let adopt = || -> io::Result<SegmentFile> {
            let file = SegmentFile {
                number: header.segment,
                path: path.clone(),
                handles: [open()?, open()?],
                direct: self.direct,
                faults: Faults::default(),
            };
            let mut block = AlignedBuffer::zeroed(BLOCK);
            header.encode(block.bytes_mut(BLOCK));
            file.write_and_flush(0, block.bytes(BLOCK), 0)?;
            std::fs::rename(&from, &path)?;
            self.directory.sync_all()?;
            Ok(file)
        };
        // The header's own write is part of making the file, and no fault is planned for it.
        let file = adopt().map_err(io_error("make segment", &path))?;
        Ok(SegmentFile { faults: self.faults.clone(), ..file })
    }

    /// Makes a segment a spare file, durably: its entries are gone.
    pub(super) fn retire(&self, segment: u64, spare: u64) -> Result<(), WalError> {
        let path = self.segment_path(segment);
        let renamed = std::fs::rename(&path, self.spare_path(spare));
        renamed.and_then(|()| self.directory.sync_all()).map_err(io_error("retire", &path))
    }

    /// Gives a spare file's room back.
    pub(super) fn remove_spare(&self, spare: u64) -> Result<(), WalError> {
        let path = self.spare_path(spare);
        std::fs::remove_file(&path).map_err(io_error("remove", &path))
    }

    fn options(&self) -> OpenOptions {
        let mut options = OpenOptions::new();
        if self.direct {
            options.custom_flags(libc::O_DIRECT | libc::O_DSYNC);
        }
        options
    }
}

impl SegmentFile {
    /// Puts blocks onto stable storage. `writer` names the caller's handle.
    pub(super) fn write(&self, writer: usize, blocks: &[u8], offset: u64) -> Result<(), WalError> {
        let written = self.write_and_flush(writer, blocks, offset);
        written.map_err(io_error("write and flush", &self.path))
    }

    /// What a flush that fails is answered with.
    pub(super) fn flush_failed(&self) -> WalError {
        io_error("write and flush", &self.path)(io::Error::other("the disk was told to fail"))
    }

    fn write_and_flush(&self, writer: usize, blocks: &[u8], offset: u64) -> io::Result<()> {
        let position = WalPosition { segment: self.number, offset };
        self.faults.hit(Point::WalWriteBefore, position)?;
        self.handles[writer].write_all_at(blocks, offset)?;
        self.faults.hit(Point::WalWriteAfter, position)?;
        if !self.direct {
            self.faults.hit(Point::WalFlushBefore, position)?;
            if !fault::has(Bug::FlushSkipped) {
                self.handles[writer].sync_data()?;
            }
        }
        self.faults.hit(Point::WalFlushAfter, position)
    }
}

/// Which log a directory holds, whoever has it open.
pub(super) fn identity_in(dir: &Path) -> Result<Option<Identity>, WalError> {
    let path = dir.join(IDENTITY);
    match std::fs::read(&path) {
        Ok(text) => Identity::decode(&text, &path).map(Some),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io_error("read", &path)(error)),
    }
}

/// Makes a directory and its parents; each is on stable storage once its own parent is flushed.
fn create_directory(dir: &Path) -> Result<(), WalError> {
    let missing: Vec<&Path> = dir.ancestors().take_while(|path| !path.exists()).collect();
    std::fs::create_dir_all(dir).map_err(io_error("make directory", dir))?;
    for made in missing {
        let parent = made.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        File::open(parent)
            .and_then(|parent| parent.sync_all())
            .map_err(io_error("flush directory", parent))?;
    }
    Ok(())
}

fn take_lock(dir: &Path) -> Result<File, WalError> {
    let path = dir.join(LOCK);
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
    let file = file.map_err(io_error("open", &path))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let holder = std::fs::read_to_string(&path).unwrap_or_default();
            let holder = if holder.trim().is_empty() { "(unknown)" } else { holder.trim() }.to_owned();
            return Err(WalError::Locked { dir: dir.to_owned(), holder });
        }
        Err(TryLockError::Error(error)) => return Err(io_error("lock", &path)(error)),
    }
    // The process id only serves the other's error message: a full disk is no reason to stop here.
    let holder = format!("{}\n", std::process::id());
    let _ = file.set_len(0).and_then(|()| file.write_all_at(holder.as_bytes(), 0));
    Ok(file)
}

/// Some file systems refuse direct I/O when the file is opened, some when it is written.
fn takes_direct_io(probe: &Path) -> Result<bool, WalError> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).custom_flags(libc::O_DIRECT | libc::O_DSYNC);
    let write = |file: File| file.write_all_at(AlignedBuffer::zeroed(BLOCK).bytes(BLOCK), 0);
    let tried = fault::hit(Point::WalProbe).and_then(|()| options.open(probe)).and_then(write);
    let _ = std::fs::remove_file(probe);
    match tried {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => Ok(false),
        // Whether it fits is another question, and answered when a segment is made.
        Err(error) if is_full(&error) => Ok(true),
        Err(error) => Err(io_error("write", probe)(error)),
    }
}

/// Whether an error means that there is no room.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge)
}
