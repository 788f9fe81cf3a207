//! Integers and texts of binary encodings to columns, within the ranges of these.
//!
//! *Owns*: which integers and texts fit which column.
//! *Does not own*: how they lie in a record (`protobuf`, `avro`), validity and rows of a column (their callers).

use sluice_shared::table::types;

use super::column::{Column, Values};
use super::fault::{Fault, cut};
use super::text::{self, DecimalShape, TextFault, Zone};

#[inline]
pub(super) fn append_integer(column: &mut Column, value: i128) -> Result<(), Fault> {
    let fits = match &mut column.values {
        Values::Int64(values) => i64::try_from(value).map(|value| values.push(value)).is_ok(),
        Values::Int32(values) => i32::try_from(value).map(|value| values.push(value)).is_ok(),
        Values::Int16(values) => i16::try_from(value).map(|value| values.push(value)).is_ok(),
        Values::Int8(values) => i8::try_from(value).map(|value| values.push(value)).is_ok(),
        Values::Date(values) => {
            let day = i64::try_from(value).ok().and_then(text::date_in_range);
            day.map(|day| values.push(day)).is_some()
        }
        Values::Timestamp(values, _) => {
            let us = i64::try_from(value).ok().and_then(text::timestamp_in_range);
            us.map(|us| values.push(us)).is_some()
        }
        Values::Decimal(values, shape) => scaled(value, *shape).map(|value| values.push(value)).is_some(),
        _ => unplanned(),
    };
    if fits { Ok(()) } else { Err(Fault::out_of_range(value, types::text(&column.data_type))) }
}

fn scaled(value: i128, shape: DecimalShape) -> Option<i128> {
    shifted(value, shape.scale.into(), shape.precision)
}

/// By so many digits to the left, where that has no more digits than the precision allows.
fn shifted(value: i128, by: u32, precision: u8) -> Option<i128> {
    let limit = 10_u128.checked_pow(precision.into())?;
    let shifted = value.checked_mul(10_i128.checked_pow(by)?)?;
    (shifted.unsigned_abs() < limit).then_some(shifted)
}

/// A decimal as its digits' number in two's complement, the highest byte first, and how many digits after the point it
/// has less than the column.
pub(super) fn append_decimal(column: &mut Column, bytes: &[u8], shift: u32) -> Result<(), Fault> {
    let Values::Decimal(values, shape) = &mut column.values else { unplanned() };
    let sign = if bytes.first().is_some_and(|byte| *byte >= 0x80) { 0xff } else { 0 };
    let leading = bytes.len().saturating_sub(16);
    let mut word = [sign; 16];
    let low = &bytes[leading..];
    word[16 - low.len()..].copy_from_slice(low);
    let value = i128::from_be_bytes(word);
    // Bytes beyond sixteen may only repeat the sign.
    let is_whole = bytes[..leading].iter().all(|byte| *byte == sign) && (value < 0) == (sign == 0xff);
    match Some(value).filter(|_| is_whole).and_then(|value| shifted(value, shift, shape.precision)) {
        Some(value) => {
            values.push(value);
            Ok(())
        }
        None => {
            let shown = format!("a number of {} bytes", bytes.len());
            Err(Fault::out_of_range(shown, types::text(&column.data_type)))
        }
    }
}

pub(super) fn append_text(column: &mut Column, value: &str) -> Result<(), Fault> {
    let appended = match &mut column.values {
        Values::Text(values) => {
            values.append(value.as_bytes());
            Ok(())
        }
        Values::Decimal(values, shape) => text::decimal(value, *shape).map(|value| values.push(value)),
        Values::Date(values) => text::date(value).map(|value| values.push(value)),
        Values::Timestamp(values, zone) => text::timestamp(value, *zone).map(|value| values.push(value)),
        _ => unplanned(),
    };
    appended.map_err(|fault| {
        let (shown, to) = (format!("{:?}", cut(value)), types::text(&column.data_type));
        match fault {
            TextFault::Range(why) => Fault::out_of_range(shown, format!("{to}: {why}")),
            TextFault::Form => Fault::wrong_type(expected_text(&column.values, &to), shown),
        }
    })
}

fn expected_text(values: &Values, column_type: &str) -> String {
    match values {
        Values::Date(_) => "a date, YYYY-MM-DD".to_owned(),
        Values::Timestamp(_, Zone::Required) => "YYYY-MM-DDThh:mm:ss[.ffffff] with Z or an offset".to_owned(),
        Values::Timestamp(_, Zone::Absent) => "YYYY-MM-DDThh:mm:ss[.ffffff] without zone".to_owned(),
        _ => format!("a number ({column_type})"),
    }
}

/// As `append_text`, of bytes that have to be UTF-8.
#[inline]
pub(super) fn append_utf8(column: &mut Column, bytes: &[u8]) -> Result<(), Fault> {
    match &mut column.values {
        // Most text is ASCII, which is seen faster.
        Values::Text(values) if bytes.is_ascii() => {
            values.append(bytes);
            Ok(())
        }
        _ => append_text(column, utf8(bytes)?),
    }
}

pub(super) fn utf8(bytes: &[u8]) -> Result<&str, Fault> {
    std::str::from_utf8(bytes).map_err(|error| {
        let got = format!("a byte that is not at byte {} of {}", error.valid_up_to(), bytes.len());
        Fault::wrong_type("text in UTF-8", got)
    })
}

fn unplanned() -> ! {
    unreachable!("plans pair only values and columns that fit")
}
