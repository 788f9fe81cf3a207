//! One stream's messages that are under way: sent and not durable, durable and not in the table.
//!
//! *Owns*: the window, what an answer covers, what has to be sent again. A core.
//! *Does not own*: connections (`stream`), what is counted (`record`).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::ensure;

use super::messages::Message;
use super::record::Covered;
use super::target::{Room, Told};
use crate::history::StreamHistory;

/// A message that is not durable.
#[derive(Debug, Clone)]
pub(crate) struct UnderWay {
    /// The offset behind its last record.
    pub(crate) end: u64,
    pub(crate) due: Duration,
    pub(crate) message: Message,
}

/// What is under way on one stream.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) undurable: VecDeque<UnderWay>,
    /// Empty where commits are not told.
    uncommitted: VecDeque<(u64, Covered)>,
    tells_commits: bool,
    bytes: usize,
    room: Room,
    pub(crate) next_offset: u64,
    pub(crate) durable_next: u64,
    /// The stream is to go elsewhere.
    pub(crate) moves: bool,
    /// No more answers come.
    pub(crate) has_ended: bool,
    /// When an answer last made room.
    pub(crate) room_at: Option<Instant>,
    /// For the auditor.
    pub(crate) notes: Option<StreamHistory>,
}

/// What an answer brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct News {
    pub(crate) rejected: u64,
}

/// What becomes of a stream's messages when it cannot be resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Lost {
    /// Records that have to be sent again, on another stream, and may be there already.
    pub(crate) doubtful: u64,
    /// Records whose commit will not be told.
    pub(crate) untold: u64,
}

impl Flight {
    /// Nothing is under way. With notes for the auditor, or without.
    pub(crate) fn new(tells_commits: bool, with_notes: bool) -> Self {
        Self {
            undurable: VecDeque::new(),
            uncommitted: VecDeque::new(),
            tells_commits,
            bytes: 0,
            room: Room { bytes: 0, messages: 0 },
            next_offset: 0,
            durable_next: 0,
            moves: false,
            has_ended: false,
            room_at: None,
            notes: with_notes.then(StreamHistory::default),
        }
    }

    /// The stream is open, again perhaps, and goes on at this offset: what is before it is durable.
    ///
    /// # Errors
    /// The service has forgotten what it acked, or knows what was never sent.
    pub(crate) fn opened(
        &mut self,
        next_offset: u64,
        room: Room,
        covered: &mut Vec<Covered>,
    ) -> anyhow::Result<()> {
        let (durable, sent) = (self.durable_next, self.next_offset);
        ensure!(
            next_offset >= durable,
            "LOST: the stream goes on at offset {next_offset}, and all before {durable} was acked"
        );
        let is_new = sent == 0 && self.undurable.is_empty();
        ensure!(
            is_new || next_offset <= sent,
            "the stream goes on at offset {next_offset} of {sent} that were sent"
        );
        let is_whole =
            |one: &UnderWay| one.end <= next_offset || one.end - u64::from(one.message.rows) >= next_offset;
        ensure!(
            self.undurable.iter().all(is_whole),
            "the stream goes on at offset {next_offset}, within a message"
        );
        if is_new {
            (self.next_offset, self.durable_next) = (next_offset, next_offset);
        }
        (self.room, self.moves, self.has_ended) = (room, false, false);
        self.answered(&Told::durable(next_offset), covered);
        Ok(())
    }

    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        // A message larger than the window goes alone.
        self.undurable.is_empty()
            || self.bytes.saturating_add(bytes) <= self.room.bytes
                && self.undurable.len() < self.room.messages
    }

    /// A message goes out; its first offset.
    pub(crate) fn push(&mut self, due: Duration, message: &Message, hashes: Option<&[u64]>) -> u64 {
        let (first, rows) = (self.next_offset, u64::from(message.rows));
        self.next_offset += rows;
        self.bytes += message.bytes;
        self.undurable.push_back(UnderWay { end: self.next_offset, due, message: message.clone() });
        if self.tells_commits {
            let covered = Covered { due, rows, bytes: message.bytes as u64, is_commit: true };
            self.uncommitted.push_back((self.next_offset, covered));
        }
        if let (Some(notes), Some(hashes)) = (&mut self.notes, hashes) {
            notes.sent(hashes);
        }
        first
    }

    /// Takes what is covered.
    pub(crate) fn answered(&mut self, told: &Told, covered: &mut Vec<Covered>) -> News {
        let durable = told.durable_next.unwrap_or(0).max(self.durable_next);
        self.durable_next = durable;
        while self.undurable.front().is_some_and(|one| one.end <= durable) {
            let Some(UnderWay { due, message, .. }) = self.undurable.pop_front() else { break };
            self.bytes -= message.bytes;
            let (rows, bytes) = (u64::from(message.rows), message.bytes as u64);
            covered.push(Covered { due, rows, bytes, is_commit: false });
        }
        let committed = told.committed_next.unwrap_or(0);
        while self.uncommitted.front().is_some_and(|(end, _)| *end <= committed) {
            covered.extend(self.uncommitted.pop_front().map(|(_, one)| one));
        }
        self.moves |= told.moves;
        if let Some(notes) = &mut self.notes {
            notes.durable(durable);
            if let (Some(next), Some(version)) = (told.committed_next, told.version) {
                notes.committed(next, version);
            }
            notes.rejected.extend(told.rejected);
        }
        News { rejected: u64::from(told.rejected.is_some()) }
    }

    /// Whether all is durable, and in the table where that is told.
    pub(crate) fn is_over(&self) -> bool {
        self.undurable.is_empty() && self.uncommitted.is_empty()
    }

    /// What is durable, and its commit not told yet.
    pub(crate) fn uncommitted(&self) -> impl Iterator<Item = Covered> + '_ {
        let durable = self.uncommitted.iter().take_while(|(end, _)| *end <= self.durable_next);
        durable.map(|(_, one)| *one)
    }

    /// The stream is gone for good: its messages that are not durable begin another one, whose offsets begin anew.
    pub(crate) fn begin_anew(&mut self) -> (Lost, Option<StreamHistory>) {
        let doubtful = self.undurable.iter().map(|one| u64::from(one.message.rows)).sum();
        let untold = self.uncommitted().map(|one| one.rows).sum();
        let (old, with_notes) = (std::mem::take(&mut self.undurable), self.notes.is_some());
        let hashes = self.notes.as_ref().map(|notes| {
            let from = usize::try_from(self.durable_next).unwrap_or(usize::MAX).min(notes.sent.len());
            notes.sent[from..].to_vec()
        });
        let mut anew = Self::new(self.tells_commits, with_notes);
        for one in &old {
            anew.push(one.due, &one.message, None);
        }
        if let (Some(notes), Some(hashes)) = (&mut anew.notes, hashes) {
            notes.sent(&hashes);
        }
        let notes = std::mem::replace(self, anew).notes;
        (Lost { doubtful, untold }, notes)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::load::messages::Body;

    const ROOM: Room = Room { bytes: 100, messages: 3 };

    fn message(rows: u32, bytes: usize) -> Message {
        Message { rows, bytes, body: Body::Payload(Bytes::new()) }
    }

    fn flight() -> Flight {
        let mut flight = Flight::new(true, true);
        flight.opened(0, ROOM, &mut Vec::new()).expect("a new stream");
        for (n, rows) in [(1, 10), (2, 5)] {
            flight.push(Duration::from_secs(n), &message(rows, 40), Some(&vec![n; rows as usize]));
        }
        flight
    }

    #[test]
    fn an_answer_covers_messages_and_makes_room() {
        let mut flight = flight();
        assert!(flight.has_room(20) && !flight.has_room(21));
        let mut covered = Vec::new();
        flight.answered(&Told::durable(14), &mut covered);
        assert_eq!(covered.iter().map(|one| (one.rows, one.is_commit)).collect::<Vec<_>>(), [(10, false)]);
        assert!(flight.has_room(60));
        let told =
            Told { durable_next: Some(15), committed_next: Some(15), version: Some(3), ..Told::default() };
        flight.answered(&told, &mut covered);
        assert_eq!(covered.len(), 4);
        assert!(flight.is_over());
        assert_eq!(flight.notes.expect("asked for").committed.len(), 1);
    }

    #[test]
    fn a_stream_that_is_resumed_sends_again_what_is_not_durable() {
        let mut flight = flight();
        let mut covered = Vec::new();
        flight.opened(10, ROOM, &mut covered).expect("resumed");
        assert_eq!((covered.len(), flight.undurable.len(), flight.next_offset), (1, 1, 15));
        flight.opened(9, ROOM, &mut covered).expect_err("offset 9 was durable");
        flight.opened(12, ROOM, &mut covered).expect_err("within a message");
        flight.opened(16, ROOM, &mut covered).expect_err("never sent");
    }

    #[test]
    fn a_stream_that_cannot_be_resumed_begins_anew() {
        let mut flight = flight();
        flight.answered(&Told::durable(10), &mut Vec::new());
        let (lost, old) = flight.begin_anew();
        assert_eq!(lost, Lost { doubtful: 5, untold: 10 });
        assert_eq!(old.expect("asked for").sent.len(), 15);
        assert_eq!((flight.next_offset, flight.durable_next, flight.undurable[0].end), (5, 0, 5));
        assert_eq!(flight.notes.expect("asked for").sent, [2; 5]);
    }
}
