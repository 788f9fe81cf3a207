//! The first pods of hot tables' orders, kept so that a decision need not look them up on the ring.
//!
//! *Owns*: for which tables, and how many.
//! *Does not own*: the order itself (`ring`); how far a table spreads (`rate`).

use std::collections::HashMap;
use std::sync::Arc;

use super::ring::TableRing;
use crate::ids::TableName;

/// For a table that stands on fewer pods a few look-ups cost less than is won.
const SPREAD_MIN: usize = 8;
/// So many pods beyond a table's own are kept too: where it overflows.
const BEYOND: usize = 32;

/// What is kept, as places among the ring's pods. All of it is of one ring.
#[derive(Debug, Clone, Default)]
pub(super) struct Firsts {
    kept: HashMap<TableName, Arc<[usize]>>,
}

impl Firsts {
    /// The table stands on so many pods now. Up to twice as many are looked up, so that a table that grows pod by pod
    /// is looked up seldom.
    pub(super) fn keep(&mut self, ring: &TableRing, table: &TableName, spread: usize) {
        let wanted = (spread + BEYOND).min(ring.pods().len());
        if spread < SPREAD_MIN || self.of(table).len() >= wanted {
            return;
        }
        let first = ring.places(table).take(wanted.next_power_of_two()).collect();
        self.kept.insert(table.clone(), first);
    }

    /// The table's first pods, as far as they are kept.
    pub(super) fn of(&self, table: &TableName) -> &[usize] {
        self.kept.get(table).map_or(&[], |first| first)
    }

    /// Keeps nothing of tables that are gone.
    pub(super) fn retain(&mut self, is_there: impl Fn(&TableName) -> bool) {
        self.kept.retain(|table, _| is_there(table));
    }

    /// The ring is another. A report soon names each hot table, and it is looked up then.
    pub(super) fn clear(&mut self) {
        self.kept.clear();
    }
}
