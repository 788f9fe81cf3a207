//! What a table is: schema, partitioning, properties, and their form in JSON.
//!
//! *Owns*: the table spec, its JSON form, which Arrow types Sluice takes.
//! *Does not own*: Delta's own metadata (`pod/src/table/delta.rs`), decoding of records.

use std::collections::BTreeMap;

use arrow::datatypes::SchemaRef;

/// What a table is to look like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableSpec {
    /// The producers' columns, in order; without the system columns.
    pub schema: SchemaRef,
    /// Names of the columns that the table is partitioned by, in order.
    pub partition_columns: Vec<String>,
    /// Delta table properties, and Sluice's own (`sluice.*`).
    pub properties: BTreeMap<String, String>,
}
