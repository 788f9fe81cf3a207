//! What one record may become.
//!
//! *Owns*: counting it while the record is read.
//! *Does not own*: how much it may be (`rows`).

use super::fault::Fault;
use crate::table::batch::ReasonCode;

/// Bytes that one record may become: two bytes of a record can be a row of thousands in a wide list.
pub(super) struct Budget {
    spent: usize,
    most: usize,
}

impl Budget {
    pub(super) fn new(most: usize) -> Self {
        Self { spent: 0, most }
    }

    pub(super) fn spent(&self) -> usize {
        self.spent
    }

    #[inline]
    pub(super) fn spend(&mut self, bytes: usize) -> Result<(), Fault> {
        self.spent += bytes;
        if self.spent <= self.most {
            return Ok(());
        }
        let message = format!("the record becomes a row of more than the {} bytes that are taken", self.most);
        Err(Fault::new(ReasonCode::RecordTooLarge, message))
    }
}
