//! As much of a pod as makes a table: its log, and tables in a directory.
//!
//! *Owns*: starting that, and ending it.
//! *Does not own*: what is measured.

use std::collections::BTreeMap;
use std::time::Duration;

use sluice_loadtest::workload::Shape;
use sluice_pod::pool::Pool;
use sluice_pod::table::{Clock, Table, Tables, TablesConfig};
use sluice_pod::wal::{Wal, WalConfig, WalError};
use sluice_shared::ids::PodId;
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use sluice_shared::table::TableSpec;
use tempfile::TempDir;
use tokio::runtime::Runtime;

const DEADLINE: Duration = Duration::from_secs(60);

/// A table of some records, and what it lives in.
pub(crate) struct Pod {
    pub(crate) table: Table,
    pub(crate) wal: Wal,
    pub(crate) runtime: Runtime,
    scope: TaskScope,
    /// Goes last.
    _directory: TempDir,
}

impl Pod {
    /// One with an empty table.
    pub(crate) fn start(shape: Shape) -> Self {
        let directory = crate::directory();
        let runtime = Runtime::new().expect("the machine grants some threads");
        let wal = open_log(&directory);
        let scope = TaskScope::new(OnPanic::EndProcess);
        let config = TablesConfig {
            root: directory.path().join("tables").into(),
            pod: id(),
            pool: Pool::alone(id()),
            flush_interval: Duration::from_secs(1),
            target_file_bytes: 64 << 20,
            memory_bytes: 256 << 20,
            checkpoint_interval: 100,
            ended_kept: Duration::from_secs(3_600),
            clock: Clock::system(),
        };
        let table = runtime.block_on(async {
            let tables = Tables::new(config, wal.clone(), scope.clone()).expect("the directory is new");
            let spec = TableSpec::new(shape.schema(), Vec::new(), BTreeMap::new());
            let name = "records".parse().expect("a valid name");
            tables.create(&name, spec.expect("tables take the workloads")).await.expect("the disk has room")
        });
        Self { table, wal, runtime, scope, _directory: directory }
    }

    /// Ends its tasks and its log.
    pub(crate) fn end(self) {
        self.runtime.block_on(async {
            self.scope.cancel();
            self.scope.join(DEADLINE).await.expect("nothing is left to do");
            self.wal.close().await;
        });
    }
}

pub(crate) fn id() -> PodId {
    "pod-1".parse().expect("a valid name")
}

/// A log of the usual sizes below a directory.
pub(crate) fn open_log(directory: &TempDir) -> Wal {
    let config = WalConfig::new(directory.path().join("wal"), id());
    let (wal, _) = Wal::open(config, Box::new(end_with)).expect("the directory is new");
    wal
}

/// What a log says of itself once it has failed is no figure.
fn end_with(error: &WalError) {
    eprintln!("the log failed, nothing can be measured: {error}");
    std::process::exit(1);
}
