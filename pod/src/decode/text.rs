//! Text to dates, timestamps, decimals and bytes, exactly or not at all.
//!
//! *Owns*: which texts are such values, and the ranges that a table can hold.
//! *Does not own*: columns, reasons.
//!
//! Dates and timestamps reach from year 1 to 9999, as Delta's readers have it. A timestamp is as RFC 3339 has it, with
//! `T` or a space in the middle; digits of the second below the microsecond must be zero, since to drop them would
//! alter the value. A leap second has no place on the time line of a table and is out of range.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

/// 0001-01-01 and 9999-12-31, in days since 1970-01-01.
pub(super) const DAY_MIN: i64 = -719_162;
pub(super) const DAY_MAX: i64 = 2_932_896;
pub(super) const DAY_US: i64 = 86_400_000_000;
/// First microsecond of year 1, last of year 9999, since 1970-01-01.
pub(super) const TIMESTAMP_MIN_US: i64 = DAY_MIN * DAY_US;
pub(super) const TIMESTAMP_MAX_US: i64 = (DAY_MAX + 1) * DAY_US - 1;

const DECIMAL_DIGITS_MAX: u32 = 38;
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Why a text is no such value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TextFault {
    /// Not of this form.
    Form,
    /// Of this form, but the table cannot hold it; says why.
    Range(&'static str),
}

/// Whether a timestamp's text names its zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Zone {
    /// `Z` or an offset stands at the end.
    Required,
    /// Nothing follows the time.
    Absent,
}

/// Days since 1970-01-01 of `YYYY-MM-DD`.
pub(super) fn date(text: &str) -> Result<i32, TextFault> {
    let days = match text.as_bytes() {
        bytes @ [_, _, _, _, _, _, _, _, _, _] => days(bytes)?,
        _ => return Err(TextFault::Form),
    };
    Ok(i32::try_from(days).expect("four digits of years are few days"))
}

/// Microseconds since 1970-01-01 of a date and time.
pub(super) fn timestamp(text: &str, zone: Zone) -> Result<i64, TextFault> {
    let bytes = text.as_bytes();
    let (Some(date), Some(b'T' | b't' | b' '), Some(time)) =
        (bytes.get(..10), bytes.get(10), bytes.get(11..))
    else {
        return Err(TextFault::Form);
    };
    let [h1, h2, b':', m1, m2, b':', s1, s2, rest @ ..] = time else { return Err(TextFault::Form) };
    let days = days(date)?;
    let hour = two_digits(*h1, *h2, 23)?;
    let minute = two_digits(*m1, *m2, 59)?;
    let second = two_digits(*s1, *s2, 60)?;
    let (fraction_us, rest) = fraction(rest)?;
    let offset_minutes = offset(rest, zone)?;
    if second == 60 {
        return Err(TextFault::Range("a leap second"));
    }
    let seconds = (hour * 60 + minute - offset_minutes) * 60 + second;
    let us = days * DAY_US + seconds * 1_000_000 + fraction_us;
    timestamp_in_range(us).ok_or(TextFault::Range("outside of the years 1 to 9999"))
}

/// The timestamp, where a table can hold it.
pub(super) fn timestamp_in_range(us: i64) -> Option<i64> {
    (TIMESTAMP_MIN_US..=TIMESTAMP_MAX_US).contains(&us).then_some(us)
}

/// The day, where a table can hold it.
pub(super) fn date_in_range(day: i64) -> Option<i32> {
    (DAY_MIN..=DAY_MAX).contains(&day).then(|| i32::try_from(day).ok()).flatten()
}

fn days(date: &[u8]) -> Result<i64, TextFault> {
    let [y1, y2, y3, y4, b'-', m1, m2, b'-', d1, d2] = date else { return Err(TextFault::Form) };
    let year = two_digits(*y1, *y2, 99)? * 100 + two_digits(*y3, *y4, 99)?;
    let month = two_digits(*m1, *m2, 12)?;
    let day = two_digits(*d1, *d2, 31)?;
    if year == 0 {
        return Err(TextFault::Range("outside of the years 1 to 9999"));
    }
    if month == 0 || day == 0 || day > days_in(month, year) {
        return Err(TextFault::Range("no such day"));
    }
    Ok(days_from_civil(year, month, day))
}

fn days_in(month: i64, year: i64) -> i64 {
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    match month {
        2 if leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days from 1970-01-01 (Howard Hinnant, "chrono-compatible low-level date algorithms", 2013). Years are not negative.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

fn two_digits(tens: u8, ones: u8, max: i64) -> Result<i64, TextFault> {
    if !tens.is_ascii_digit() || !ones.is_ascii_digit() {
        return Err(TextFault::Form);
    }
    let number = i64::from(tens - b'0') * 10 + i64::from(ones - b'0');
    if number > max { Err(TextFault::Range("no such day or time")) } else { Ok(number) }
}

/// Microseconds of `.123…`, and what follows.
fn fraction(bytes: &[u8]) -> Result<(i64, &[u8]), TextFault> {
    let [b'.', bytes @ ..] = bytes else { return Ok((0, bytes)) };
    let digits = bytes.iter().take_while(|b| b.is_ascii_digit()).count();
    if digits == 0 {
        return Err(TextFault::Form);
    }
    let (digits, rest) = bytes.split_at(digits);
    let (kept, dropped) = digits.split_at(digits.len().min(6));
    if dropped.iter().any(|digit| *digit != b'0') {
        return Err(TextFault::Range("finer than a microsecond"));
    }
    let padded = kept.iter().copied().chain(std::iter::repeat(b'0')).take(6);
    Ok((padded.fold(0, |us, digit| us * 10 + i64::from(digit - b'0')), rest))
}

/// Minutes east of Greenwich.
fn offset(bytes: &[u8], zone: Zone) -> Result<i64, TextFault> {
    match (zone, bytes) {
        (Zone::Absent, []) | (Zone::Required, [b'Z' | b'z']) => Ok(0),
        (Zone::Required, [sign @ (b'+' | b'-'), h1, h2, b':', m1, m2]) => {
            let minutes = two_digits(*h1, *h2, 23)? * 60 + two_digits(*m1, *m2, 59)?;
            Ok(if *sign == b'-' { -minutes } else { minutes })
        }
        _ => Err(TextFault::Form),
    }
}

/// How a decimal column is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DecimalShape {
    /// Digits in all, 1 to 38.
    pub precision: u8,
    /// Digits after the point.
    pub scale: u8,
}

/// The number, times ten to the scale. Takes what JSON takes as a number, and leading zeros.
pub(super) fn decimal(text: &str, shape: DecimalShape) -> Result<i128, TextFault> {
    const TOO_LARGE: TextFault = TextFault::Range("more digits than the precision");
    let (negative, unsigned) = match text.strip_prefix('-') {
        Some(unsigned) => (true, unsigned),
        None => (false, text),
    };
    let (number, exponent) = match unsigned.split_once(['e', 'E']) {
        Some((number, exponent)) => (number, exponent_of(exponent)?),
        None => (unsigned, 0),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let all_digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if !all_digits(whole) || !all_digits(fraction) {
        return Err(TextFault::Form);
    }
    // Trailing zeros are kept as a count, so that 1e2, 100 and 100.000 are one number.
    let (mut significant, mut digits, mut zeros) = (0_i128, 0_u32, 0_u32);
    for digit in whole.bytes().chain(fraction.bytes()).map(|b| i128::from(b - b'0')) {
        if digit == 0 {
            zeros += u32::from(digits > 0);
            continue;
        }
        digits += zeros + 1;
        if digits > DECIMAL_DIGITS_MAX {
            return Err(TOO_LARGE);
        }
        significant = significant * 10_i128.pow(zeros + 1) + digit;
        zeros = 0;
    }
    if significant == 0 {
        return Ok(0);
    }
    let fraction_digits = i64::try_from(fraction.len()).map_err(|_| TOO_LARGE)?;
    let shift = exponent + i64::from(zeros) - fraction_digits + i64::from(shape.scale);
    if shift < 0 {
        return Err(TextFault::Range("more digits after the point than the scale"));
    }
    if i64::from(digits) + shift > i64::from(shape.precision) {
        return Err(TOO_LARGE);
    }
    let unsigned = significant * 10_i128.pow(u32::try_from(shift).map_err(|_| TOO_LARGE)?);
    Ok(if negative { -unsigned } else { unsigned })
}

fn exponent_of(text: &str) -> Result<i64, TextFault> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(TextFault::Form);
    }
    // Exponents beyond this decide as this one does, whatever the digits.
    const EXPONENT_MAX: i64 = 1 << 40;
    let exponent = digits.parse().unwrap_or(EXPONENT_MAX).min(EXPONENT_MAX);
    Ok(if text.starts_with('-') { -exponent } else { exponent })
}

/// Appends the bytes of standard base64, padded or not.
pub(super) fn base64(text: &str, out: &mut Vec<u8>) -> Result<(), TextFault> {
    BASE64.decode_vec(text, out).map_err(|_| TextFault::Form)
}

#[cfg(test)]
mod tests {
    use chrono::{DateTime, NaiveDate};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn dates() {
        for (text, day) in [
            ("1970-01-01", Ok(0)),
            ("1969-12-31", Ok(-1)),
            ("2000-02-29", Ok(11_016)),
            ("0001-01-01", Ok(-719_162)),
            ("9999-12-31", Ok(2_932_896)),
            ("1900-02-29", Err(TextFault::Range("no such day"))),
            ("2024-13-01", Err(TextFault::Range("no such day or time"))),
            ("2024-00-01", Err(TextFault::Range("no such day"))),
            ("0000-01-01", Err(TextFault::Range("outside of the years 1 to 9999"))),
            ("2024-1-1", Err(TextFault::Form)),
            ("2024-01-01T", Err(TextFault::Form)),
            ("2024/01/01", Err(TextFault::Form)),
            ("２024-01-1", Err(TextFault::Form)),
        ] {
            assert_eq!(date(text), day, "{text}");
        }
    }

    #[test]
    fn timestamps() {
        let form = Err(TextFault::Form);
        for (text, zoned, bare) in [
            ("1970-01-01T00:00:01Z", Ok(1_000_000), form),
            ("1970-01-01 00:00:01.5z", Ok(1_500_000), form),
            ("1970-01-01T01:00:00.000001+01:00", Ok(1), form),
            ("1969-12-31T19:30:00-04:30", Ok(0), form),
            ("1970-01-01T00:00:01.123456000", form, Ok(1_123_456)),
            ("1970-01-01T00:00:00.1234567", Err(TextFault::Range("finer than a microsecond")), {
                Err(TextFault::Range("finer than a microsecond"))
            }),
            ("2016-12-31T23:59:60Z", Err(TextFault::Range("a leap second")), form),
            ("0001-01-01T00:00:00+00:01", Err(TextFault::Range("outside of the years 1 to 9999")), form),
            ("1970-01-01T24:00:00Z", Err(TextFault::Range("no such day or time")), {
                Err(TextFault::Range("no such day or time"))
            }),
            ("1970-01-01T00:00Z", form, form),
            ("1970-01-01T00:00:00.Z", form, form),
            ("1970-01-01T00:00:00+0100", form, form),
            ("1970-01-01", form, form),
            ("", form, form),
        ] {
            assert_eq!(timestamp(text, Zone::Required), zoned, "{text}");
            assert_eq!(timestamp(text, Zone::Absent), bare, "{text}");
        }
    }

    #[test]
    fn decimals() {
        let shape = DecimalShape { precision: 5, scale: 2 };
        let too_large = Err(TextFault::Range("more digits than the precision"));
        let too_fine = Err(TextFault::Range("more digits after the point than the scale"));
        for (text, value) in [
            ("0.1", Ok(10)),
            ("-0.10000", Ok(-10)),
            ("0", Ok(0)),
            ("-0.000", Ok(0)),
            ("0e99999999999999999999", Ok(0)),
            ("1e2", Ok(10_000)),
            ("12345e-2", Ok(12_345)),
            ("999.99", Ok(99_999)),
            ("007.5", Ok(750)),
            ("1000", too_large),
            ("1e99999999999999999999", too_large),
            ("123456789012345678901234567890123456789", too_large),
            ("0.001", too_fine),
            ("1e-99999999999999999999", too_fine),
            ("", Err(TextFault::Form)),
            ("-", Err(TextFault::Form)),
            (".5", Err(TextFault::Form)),
            ("5.", Err(TextFault::Form)),
            ("+5", Err(TextFault::Form)),
            ("1e", Err(TextFault::Form)),
            ("NaN", Err(TextFault::Form)),
            ("1 ", Err(TextFault::Form)),
        ] {
            assert_eq!(decimal(text, shape), value, "{text}");
        }
        let wide = DecimalShape { precision: 38, scale: 0 };
        assert_eq!(decimal("99999999999999999999999999999999999999", wide), Ok(10_i128.pow(38) - 1));
    }

    proptest! {
        #[test]
        fn days_agree_with_chrono(day in DAY_MIN..=DAY_MAX) {
            let epoch = NaiveDate::from_ymd_opt(1970, 1, 1).expect("valid");
            let text = (epoch + chrono::TimeDelta::days(day)).format("%Y-%m-%d").to_string();
            prop_assert_eq!(date(&text).map(i64::from), Ok(day));
        }

        #[test]
        fn timestamps_agree_with_chrono(us in TIMESTAMP_MIN_US..=TIMESTAMP_MAX_US) {
            let text = DateTime::from_timestamp_micros(us).expect("in range").to_rfc3339();
            prop_assert_eq!(timestamp(&text, Zone::Required), Ok(us));
        }

        #[test]
        fn any_text_is_read_or_refused(text: String) {
            let _ = (date(&text), timestamp(&text, Zone::Required), timestamp(&text, Zone::Absent));
            let _ = (decimal(&text, DecimalShape { precision: 38, scale: 9 }), base64(&text, &mut Vec::new()));
        }
    }
}
