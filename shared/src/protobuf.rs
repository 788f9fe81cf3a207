//! The wire of protobuf: varints, fixed words, lengths, and what is to be skipped.
//!
//! *Owns*: reading bytes of one message, and refusing those that are none. A core.
//! *Does not own*: which field means what: the pod's decoder of records has a plan, the gateway's OTLP edge knows.
//!
//! As the encoding guide of protobuf.dev has it. A varint has at most 64 bits in ten bytes; field numbers begin at 1.

use crate::error::Error;

/// Deepest nesting of groups that are skipped.
const GROUP_DEPTH_MAX: usize = 64;
/// Largest field number.
pub const NUMBER_MAX: u32 = (1 << 29) - 1;

/// Bytes that are no message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a protobuf message: at byte {at}: {why}")]
pub struct Malformed {
    /// Where, from the record's first byte.
    pub at: usize,
    /// What is wrong there.
    pub why: String,
}

impl From<Malformed> for Error {
    fn from(malformed: Malformed) -> Self {
        Self::invalid("malformed_protobuf", malformed.to_string())
    }
}

/// How a value lies on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WireType {
    /// Seven bits a byte, the lowest first.
    Varint,
    /// Eight bytes.
    Fixed64,
    /// A length, then as many bytes.
    Delimited,
    /// Begins a group.
    GroupStart,
    /// Ends it.
    GroupEnd,
    /// Four bytes.
    Fixed32,
}

impl WireType {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Varint => "a varint",
            Self::Fixed64 => "eight bytes",
            Self::Delimited => "bytes with a length",
            Self::GroupStart | Self::GroupEnd => "a group",
            Self::Fixed32 => "four bytes",
        }
    }
}

/// A field's number, and how its value lies there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tag {
    /// The field's number.
    pub number: u32,
    /// How its value lies there.
    pub wire: WireType,
}

/// A place in a record. A nested message has a reader of its own, over the same bytes as far as its end.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// At the start of a record.
    pub fn new(record: &'a [u8]) -> Self {
        Self { bytes: record, at: 0 }
    }

    /// Whether nothing is left.
    pub fn is_done(&self) -> bool {
        self.at == self.bytes.len()
    }

    /// Bytes that are left.
    pub fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next field's number and kind.
    ///
    /// # Errors
    /// The bytes are no message.
    #[inline]
    pub fn tag(&mut self) -> Result<Tag, Malformed> {
        let start = self.at;
        let word = self.varint()?;
        let wire = match word & 7 {
            0 => WireType::Varint,
            1 => WireType::Fixed64,
            2 => WireType::Delimited,
            3 => WireType::GroupStart,
            4 => WireType::GroupEnd,
            5 => WireType::Fixed32,
            _ => return Err(bad_tag(start, word)),
        };
        match u32::try_from(word >> 3) {
            Ok(number @ 1..=NUMBER_MAX) => Ok(Tag { number, wire }),
            _ => Err(bad_tag(start, word)),
        }
    }

    /// A number of up to 64 bits.
    ///
    /// # Errors
    /// The bytes are no message.
    #[inline]
    pub fn varint(&mut self) -> Result<u64, Malformed> {
        match self.bytes[self.at..] {
            [byte, ..] if byte < 0x80 => {
                self.at += 1;
                Ok(u64::from(byte))
            }
            [first, second, ..] if second < 0x80 => {
                self.at += 2;
                Ok(u64::from(first & 0x7f) | u64::from(second) << 7)
            }
            _ => self.long_varint(),
        }
    }

    fn long_varint(&mut self) -> Result<u64, Malformed> {
        let (start, mut value) = (self.at, 0_u64);
        for (place, byte) in self.bytes[start..].iter().take(10).enumerate() {
            if place == 9 && *byte > 1 {
                return Err(malformed(start, "a varint of more than 64 bits"));
            }
            value |= u64::from(byte & 0x7f) << (7 * place);
            if *byte < 0x80 {
                self.at += place + 1;
                return Ok(value);
            }
        }
        let why = if self.left() < 10 {
            "the record ends within a varint"
        } else {
            "a varint of more than 64 bits"
        };
        Err(malformed(start, why))
    }

    /// A number of 32 bits.
    ///
    /// # Errors
    /// The bytes are no message.
    #[inline]
    pub fn fixed32(&mut self) -> Result<[u8; 4], Malformed> {
        self.fixed()
    }

    /// A number of 64 bits.
    ///
    /// # Errors
    /// The bytes are no message.
    #[inline]
    pub fn fixed64(&mut self) -> Result<[u8; 8], Malformed> {
        self.fixed()
    }

    #[inline]
    fn fixed<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let Some(word) = self.bytes[self.at..].first_chunk::<N>() else {
            return Err(malformed(self.at, &format!("the record ends within {N} bytes of a number")));
        };
        self.at += N;
        Ok(*word)
    }

    /// A length, then as many bytes.
    ///
    /// # Errors
    /// The bytes are no message.
    #[inline]
    pub fn delimited(&mut self) -> Result<&'a [u8], Malformed> {
        let end = self.end_of_delimited()?;
        let value = &self.bytes[self.at..end];
        self.at = end;
        Ok(value)
    }

    /// As `delimited`, to be read on.
    ///
    /// # Errors
    /// The bytes are no message.
    #[inline]
    pub fn nested(&mut self) -> Result<Self, Malformed> {
        let end = self.end_of_delimited()?;
        let nested = Self { bytes: &self.bytes[..end], at: self.at };
        self.at = end;
        Ok(nested)
    }

    #[inline]
    fn end_of_delimited(&mut self) -> Result<usize, Malformed> {
        let start = self.at;
        let length = self.varint()?;
        match usize::try_from(length) {
            Ok(length) if length <= self.left() => Ok(self.at + length),
            _ => {
                let left = self.left();
                Err(malformed(start, &format!("a length of {length} bytes, of which {left} are left")))
            }
        }
    }

    /// Skips the value of a field that nobody wants.
    ///
    /// # Errors
    /// The bytes are no message.
    pub fn skip(&mut self, tag: Tag) -> Result<(), Malformed> {
        match tag.wire {
            WireType::Varint => self.varint().map(drop),
            WireType::Fixed64 => self.fixed64().map(drop),
            WireType::Delimited => self.delimited().map(drop),
            WireType::Fixed32 => self.fixed32().map(drop),
            WireType::GroupStart => self.skip_group(tag.number),
            WireType::GroupEnd => Err(self.unopened(tag.number)),
        }
    }

    fn skip_group(&mut self, number: u32) -> Result<(), Malformed> {
        let mut open = vec![number];
        while let Some(innermost) = open.last() {
            if self.is_done() {
                return Err(malformed(self.at, &format!("the record ends within group {innermost}")));
            }
            let tag = self.tag()?;
            match tag.wire {
                WireType::GroupStart if open.len() == GROUP_DEPTH_MAX => {
                    return Err(malformed(self.at, &format!("groups nested deeper than {GROUP_DEPTH_MAX}")));
                }
                WireType::GroupStart => open.push(tag.number),
                WireType::GroupEnd if tag.number == *innermost => drop(open.pop()),
                WireType::GroupEnd => return Err(self.unopened(tag.number)),
                _ => self.skip(tag)?,
            }
        }
        Ok(())
    }

    fn unopened(&self, number: u32) -> Malformed {
        malformed(self.at, &format!("the end of group {number}, which is not open"))
    }
}

#[cold]
fn bad_tag(at: usize, word: u64) -> Malformed {
    let (number, wire) = (word >> 3, word & 7);
    let why =
        format!("field number {number} is out of the range 1 to 2^29-1, or there is no wire type {wire}");
    malformed(at, &why)
}

#[cold]
fn malformed(at: usize, why: &str) -> Malformed {
    Malformed { at, why: why.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(bytes: &[u8], read: impl FnOnce(&mut Reader<'_>) -> Result<(), Malformed>) -> Option<String> {
        let mut reader = Reader::new(bytes);
        match read(&mut reader) {
            Ok(()) => {
                assert!(reader.is_done(), "{bytes:?}");
                None
            }
            Err(fault) => Some(fault.to_string()),
        }
    }

    #[test]
    fn varints_have_up_to_64_bits() {
        for (bytes, value) in [
            (&[0x00][..], 0),
            (&[0x96, 0x01], 150),
            (&[0x80, 0x00], 0),
            (&[0xff, 0xff, 0x03], 0xffff),
            (&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01], u64::MAX),
        ] {
            assert_eq!(Reader::new(bytes).varint().ok(), Some(value), "{bytes:?}");
        }
        for bytes in [&[][..], &[0x80], &[0xff; 9], &[0xff; 10], &[0xff; 12]] {
            assert!(Reader::new(bytes).varint().is_err(), "{bytes:?}");
        }
        let two = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02];
        assert!(Reader::new(&two).varint().is_err());
    }

    #[test]
    fn what_is_skipped_is_sound() {
        let skip = |reader: &mut Reader<'_>| {
            let tag = reader.tag()?;
            reader.skip(tag)
        };
        for bytes in [
            &[0x08, 0x80, 0x01][..],
            &[0x09, 1, 2, 3, 4, 5, 6, 7, 8],
            &[0x0a, 2, 1, 2],
            &[0x0d, 1, 2, 3, 4],
            &[0x0b, 0x0c],
            &[0x0b, 0x08, 1, 0x13, 0x14, 0x0c],
        ] {
            assert_eq!(code(bytes, skip), None, "{bytes:?}");
        }
        for (bytes, why) in [
            (&[0x00, 0x01][..], "field number 0"),
            (&[0x0e], "no wire type 6"),
            (&[0x0f], "no wire type 7"),
            (&[0x0a, 3, 1, 2], "a length of 3"),
            (&[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01], "a length of 1844674407"),
            (&[0x0d, 1], "ends within 4"),
            (&[0x0b], "ends within group 1"),
            (&[0x0b, 0x14], "the end of group 2"),
            (&[0x0c], "the end of group 1"),
            (&[0x80, 0x80, 0x80, 0x80, 0x10], "out of the range"),
        ] {
            let told = code(bytes, skip).unwrap_or_default();
            assert!(told.contains(why), "{bytes:?}: {told}");
        }
        let deep = [vec![0x0b; 65], vec![0x0c; 65]].concat();
        assert!(code(&deep, skip).expect("too deep").contains("nested deeper"));
        assert_eq!(code(&[vec![0x0b; 64], vec![0x0c; 64]].concat(), skip), None);
    }
}
