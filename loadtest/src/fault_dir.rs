//! A process's directory of faults, from outside: arming points, planting bugs, reading what has happened.
//!
//! *Owns*: the files as the rig writes them.
//! *Does not own*: what they mean (`shared::fault`), when what is armed (`chaos`).

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use sluice_shared::fault::{self, Action, Bug, Counts, Point};

/// Whether a program has fault points: a release has none.
///
/// # Errors
/// It has none; it cannot be read.
pub fn check(program: &Path) -> anyhow::Result<()> {
    let bytes = std::fs::read(program).with_context(|| program.display().to_string())?;
    let point = Point::WalWriteBefore.name().as_bytes();
    ensure!(
        memchr::memmem::find(&bytes, point).is_some(),
        "{}: a release, which has no fault points: build without `--release` or with `--features sluice/faults`, as `make \
         chaos` and `make soak` do",
        program.display()
    );
    Ok(())
}

/// One process's, through all its lives.
#[derive(Debug, Clone)]
pub struct FaultDir {
    dir: PathBuf,
}

impl FaultDir {
    /// The one at `dir`, which is made when it is needed.
    pub fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    /// Something is to happen at a point.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn arm(&self, point: Point, action: &Action) -> anyhow::Result<()> {
        // Whole at once: the process may look at any time.
        let new = self.dir.join("new");
        self.write("new", &action.to_string())?;
        let path = self.dir.join(point.name());
        std::fs::rename(&new, &path).with_context(|| path.display().to_string())
    }

    /// Nothing more is to happen at a point. Answers whether something still was.
    ///
    /// # Errors
    /// It cannot be taken away.
    pub fn disarm(&self, point: Point) -> anyhow::Result<bool> {
        self.remove(point.name())
    }

    /// Plants a bug, for lives that begin from now on.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn plant(&self, bug: Bug) -> anyhow::Result<()> {
        self.write(&format!("bug.{}", bug.name()), "")
    }

    /// The wall clock is wrong from now on.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn set_clock(&self, wrong_ms: i64) -> anyhow::Result<()> {
        self.write("clock", &wrong_ms.to_string())
    }

    /// The point at which the process has ended itself, where it has. It is told once.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn take_killed(&self) -> anyhow::Result<Option<Point>> {
        let path = self.dir.join("killed");
        let name = std::fs::read_to_string(&path).unwrap_or_default();
        Ok(if self.remove("killed")? { Point::named(&name) } else { None })
    }

    /// What has happened so far.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn counts(&self) -> anyhow::Result<Counts> {
        fault::read_counts(&self.dir).with_context(|| self.dir.display().to_string())
    }

    fn write(&self, name: &str, text: &str) -> anyhow::Result<()> {
        let path = self.dir.join(name);
        std::fs::create_dir_all(&self.dir)
            .and_then(|()| std::fs::write(&path, text))
            .with_context(|| path.display().to_string())
    }

    fn remove(&self, name: &str) -> anyhow::Result<bool> {
        let path = self.dir.join(name);
        match std::fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error).with_context(|| path.display().to_string()),
        }
    }
}
