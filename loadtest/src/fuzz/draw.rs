//! Decisions out of an input's bytes.
//!
//! *Owns*: how bytes become numbers; past the end all are zero.
//! *Does not own*: what is decided.

/// Values that lie at the edges of what lengths and counts can be.
const EDGES: [u64; 12] = [
    0,
    1,
    7,
    0x7f,
    0xff,
    0xfff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    0xffff_ffff_ffff_fffe,
    u64::MAX,
];

/// What is left of an input.
#[derive(Debug, Clone)]
pub struct Draw<'a> {
    bytes: &'a [u8],
}

impl<'a> Draw<'a> {
    /// All of it.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    /// Whether nothing is left.
    pub fn is_done(&self) -> bool {
        self.bytes.is_empty()
    }

    /// A byte.
    pub fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    /// A number below `limit`, which is at least 1 and at most 65,536.
    pub fn below(&mut self, limit: usize) -> usize {
        let low = usize::from(self.byte());
        let value = if limit > 256 { low << 8 | usize::from(self.byte()) } else { low };
        value % limit
    }

    /// Yes or no.
    pub fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// Any number, those at the edges more often.
    pub fn number(&mut self) -> u64 {
        let choice = self.below(32);
        match EDGES.get(choice) {
            Some(edge) => *edge,
            None if choice < 24 => u64::from(self.byte()),
            None => {
                let mut bytes = [0; 8];
                let taken = self.take(8);
                bytes[..taken.len()].copy_from_slice(taken);
                u64::from_le_bytes(bytes)
            }
        }
    }

    /// Up to so many bytes.
    pub fn take(&mut self, bytes: usize) -> &'a [u8] {
        let (taken, rest) = self.bytes.split_at(bytes.min(self.bytes.len()));
        self.bytes = rest;
        taken
    }

    /// Bytes behind their length of two bytes.
    pub fn sized(&mut self) -> &'a [u8] {
        let bytes = usize::from(self.byte()) | usize::from(self.byte()) << 8;
        self.take(bytes)
    }

    /// All that is left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.bytes)
    }

    /// All that is left, cut in pieces; where they end is taken from its beginning.
    pub fn pieces(&mut self) -> Vec<&'a [u8]> {
        let steps: Vec<usize> = (0..self.below(4)).map(|_| self.below(256)).collect();
        let mut rest = self.rest();
        let mut pieces = Vec::new();
        for step in steps {
            let (piece, behind) = rest.split_at(step.min(rest.len()));
            pieces.push(piece);
            rest = behind;
        }
        pieces.push(rest);
        pieces
    }
}
