//! A small file system of its own for a log: it can be full, and it can lose its power.
//!
//! An ext4 image on a loop device, mounted in a mount namespace of the calling thread and of the processes that it starts:
//! whatever becomes of the test, nothing stays mounted. Power loss is ext4's shutdown call without a flush of its journal:
//! what was not flushed is gone, and what was open fails from then on.
//!
//! *Owns*: mounting, filling, the shutdown call.
//! *Does not own*: when (`chaos`). Without the right to mount there is no volume, and the caller says what it leaves out.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};

/// Some log segments of the rig's size.
const VOLUME_BYTES: u64 = 48 << 20;
/// Written at once while it is filled.
const BALLAST_CHUNK: usize = 256 << 10;
/// `EXT4_IOC_SHUTDOWN`: `_IOR('X', 125, __u32)`.
const SHUTDOWN: libc::c_ulong = 0x8004_587d;
/// `EXT4_GOING_FLAGS_NOLOGFLUSH`.
const WITHOUT_FLUSH: u32 = 2;

/// A mounted volume. What starts it must be the thread that starts the processes which are to see it.
pub struct Volume {
    image: PathBuf,
    at: PathBuf,
    is_mounted: bool,
}

impl Volume {
    /// Makes one and mounts it at `at`. Call it from the thread that starts processes.
    ///
    /// # Errors
    /// The machine does not allow it: says why.
    pub fn mount(image: &Path, at: &Path) -> anyhow::Result<Self> {
        let file = File::create(image).with_context(|| image.display().to_string())?;
        file.set_len(VOLUME_BYTES)?;
        drop(file);
        std::fs::create_dir_all(at)?;
        run("mkfs.ext4", &["-q", "-F", path(image)?])?;
        own_namespace()?;
        let mut volume = Self { image: image.to_owned(), at: at.to_owned(), is_mounted: false };
        volume.mount_again()?;
        Ok(volume)
    }

    /// Mounts it where it was, after `lose_power`.
    ///
    /// # Errors
    /// It cannot be mounted.
    pub fn mount_again(&mut self) -> anyhow::Result<()> {
        run("mount", &["-o", "loop", path(&self.image)?, path(&self.at)?])?;
        self.is_mounted = true;
        Ok(())
    }

    /// Takes all room that is left.
    ///
    /// # Errors
    /// Anything but a full disk.
    pub fn fill(&self) -> anyhow::Result<()> {
        use std::io::{ErrorKind, Write};
        let mut ballast = File::create(self.at.join("ballast"))?;
        let chunk = vec![1; BALLAST_CHUNK];
        let filled = loop {
            if let Err(error) = ballast.write_all(&chunk) {
                break error;
            }
        };
        ensure!(filled.kind() == ErrorKind::StorageFull, "filling a volume: {filled}");
        Ok(())
    }

    /// Gives the room back.
    ///
    /// # Errors
    /// It cannot.
    pub fn empty(&self) -> anyhow::Result<()> {
        match std::fs::remove_file(self.at.join("ballast")) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error).context("ballast"),
            _ => Ok(()),
        }
    }

    /// All that is not flushed is lost, and nothing works any more.
    ///
    /// # Errors
    /// The file system does not know the call.
    #[allow(unsafe_code, reason = "the only way to ask for it")]
    pub fn lose_power(&self) -> anyhow::Result<()> {
        let directory = File::open(&self.at)?;
        let flags = WITHOUT_FLUSH;
        // SAFETY: the call reads a `u32` from a pointer to one that outlives it; the descriptor is open.
        let done = unsafe { libc::ioctl(directory.as_raw_fd(), SHUTDOWN, &raw const flags) };
        ensure!(done == 0, "shutdown of {}: {}", self.at.display(), std::io::Error::last_os_error());
        Ok(())
    }

    /// After `lose_power`, once nobody has anything open there.
    ///
    /// # Errors
    /// Somebody has.
    pub fn unmount(&mut self) -> anyhow::Result<()> {
        run("umount", &[path(&self.at)?])?;
        self.is_mounted = false;
        Ok(())
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        if self.is_mounted {
            // Else the namespace's end does it.
            let _ = run("umount", &["-l", &self.at.display().to_string()]);
        }
    }
}

fn path(path: &Path) -> anyhow::Result<&str> {
    path.to_str().with_context(|| path.display().to_string())
}

fn run(program: &str, arguments: &[&str]) -> anyhow::Result<()> {
    let ran = Command::new(program).args(arguments).output().with_context(|| program.to_owned())?;
    if !ran.status.success() {
        bail!("{program} {}: {}", arguments.join(" "), String::from_utf8_lossy(&ran.stderr).trim());
    }
    Ok(())
}

/// What this thread and its children mount from now on, others do not see.
#[allow(unsafe_code, reason = "the standard library has no namespaces")]
fn own_namespace() -> anyhow::Result<()> {
    // SAFETY: a plain system call without memory of ours, about this thread alone.
    let done = unsafe { libc::unshare(libc::CLONE_NEWNS) };
    ensure!(done == 0, "a mount namespace: {}", std::io::Error::last_os_error());
    run("mount", &["--make-rprivate", "/"])
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn what_is_flushed_outlives_the_power() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = dir.path().join("volume");
        let mut volume = match Volume::mount(&dir.path().join("image"), &at) {
            Ok(volume) => volume,
            Err(why) => return println!("skipped, no volume can be mounted: {why:#}"),
        };
        let mut kept = File::create(at.join("kept")).expect("made");
        kept.write_all(b"kept").and_then(|()| kept.sync_all()).expect("flushed");
        File::open(&at).and_then(|directory| directory.sync_all()).expect("flushed");
        let mut lost = File::create(at.join("lost")).expect("made");
        lost.write_all(b"lost").expect("written");
        volume.lose_power().expect("a shutdown");
        assert!(kept.write_all(b"more").and_then(|()| kept.sync_all()).is_err(), "nothing works any more");
        drop((kept, lost));
        volume.unmount().expect("nothing is open");
        volume.mount_again().expect("mounted");
        assert_eq!(std::fs::read(at.join("kept")).expect("there"), b"kept");
        assert_ne!(std::fs::read(at.join("lost")).unwrap_or_default(), b"lost");
        volume.fill().expect("full");
        assert!(
            File::create(at.join("one more")).and_then(|mut file| file.write_all(&[0; 1 << 20])).is_err()
        );
        volume.empty().expect("emptied");
        std::fs::write(at.join("one more"), [0; 1 << 20]).expect("there is room");
    }
}
