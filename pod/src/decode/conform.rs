//! Arrow columns to the types of a table, without loss; rows that cannot go are named.
//!
//! *Owns*: which types go into which, the conversion of values, nulls where none may be.
//! *Does not own*: the frame (`arrow`), which table type stands for a new column (`sluice_shared::table`).
//!
//! Equal types keep their buffers. Integers go into any integer or decimal that can hold the value; timestamps into
//! microseconds where nothing is cut off; all texts into Utf8, all byte strings into Binary, dictionaries into their
//! values. Floats widen, decimals may get digits. All else is a mismatch of the schemas.

use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryViewArray, FixedSizeListArray, ListArray, MapArray, StringViewArray,
    StructArray, UInt64Array, new_null_array,
};
use arrow::buffer::NullBuffer;
use arrow::compute::{CastOptions, cast_with_options, take};
use arrow::datatypes::{
    DataType, Date32Type, Date64Type, Decimal128Type, Field, FieldRef, Fields, Int64Type, TimeUnit,
    TimestampMicrosecondType,
};
use arrow::error::ArrowError;
use sluice_shared::error::Error;
use sluice_shared::table::types;

use super::ipc::{Budget, invalid};
use super::text::{DAY_US, date_in_range, timestamp_in_range};
use crate::table::batch::ReasonCode;

/// Why values of a column do not fit; shared by all of them.
#[derive(Debug)]
pub(super) struct Misfit {
    pub code: ReasonCode,
    pub column: String,
    pub message: String,
}

/// Places in an array whose value does not fit.
pub(super) type Misfits = Vec<(usize, Rc<Misfit>)>;

/// Whether values of one type can become values of another, each by itself perhaps refused.
pub(super) fn conforms(from: &DataType, to: &DataType) -> bool {
    match (from, to) {
        (DataType::Dictionary(_, value), _) => conforms(value, to),
        (
            DataType::List(from) | DataType::LargeList(from) | DataType::FixedSizeList(from, _),
            DataType::List(to),
        ) => conforms(from.data_type(), to.data_type()),
        (DataType::Struct(from), DataType::Struct(to)) => {
            let known = from.iter().all(|from| to.iter().any(|to| to.name() == from.name()));
            let there = |to: &FieldRef| match from.iter().find(|from| from.name() == to.name()) {
                Some(from) => conforms(from.data_type(), to.data_type()),
                None => to.is_nullable(),
            };
            known && to.iter().all(there)
        }
        (DataType::Map(from, _), DataType::Map(to, _)) => match (from.data_type(), to.data_type()) {
            (DataType::Struct(from), DataType::Struct(to)) if from.len() == 2 && to.len() == 2 => {
                conforms(from[0].data_type(), to[0].data_type())
                    && conforms(from[1].data_type(), to[1].data_type())
            }
            _ => false,
        },
        (DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View, DataType::Utf8) => true,
        (
            DataType::Binary | DataType::LargeBinary | DataType::BinaryView | DataType::FixedSizeBinary(_),
            DataType::Binary,
        ) => true,
        (DataType::Date32 | DataType::Date64, DataType::Date32) => true,
        (DataType::Timestamp(_, from), DataType::Timestamp(_, to)) => from.is_some() == to.is_some(),
        (DataType::Float16, DataType::Float32 | DataType::Float64) => true,
        (DataType::Float32, DataType::Float64) => true,
        (from, DataType::Decimal128(_, to_scale)) => match from {
            DataType::Decimal32(_, scale)
            | DataType::Decimal64(_, scale)
            | DataType::Decimal128(_, scale)
            | DataType::Decimal256(_, scale) => scale <= to_scale,
            _ => from.is_integer(),
        },
        _ => from == to || (from.is_integer() && to.is_integer()),
    }
}

/// Bytes of a null of this type, at least.
pub(super) fn null_bytes(data_type: &DataType) -> usize {
    match data_type {
        DataType::Struct(fields) => {
            1 + fields.iter().map(|field| null_bytes(field.data_type())).sum::<usize>()
        }
        DataType::Utf8 | DataType::Binary | DataType::List(_) | DataType::Map(..) => 5,
        _ => 1 + data_type.primitive_width().unwrap_or(1),
    }
}

/// Converts columns; what does not fit is null and in the misfits. Nested fields are nullable until `settle`.
pub(super) struct Conversion<'a> {
    pub budget: &'a mut Budget,
}

impl Conversion<'_> {
    /// A column in the field's type, and where it does not fit.
    pub(super) fn column(&mut self, array: &ArrayRef, field: &Field) -> Result<(ArrayRef, Misfits), Error> {
        self.field(array, field, field.name(), None)
    }

    /// `covered` are the nulls of the struct around: what they cover is no value.
    fn field(
        &mut self,
        array: &ArrayRef,
        field: &Field,
        path: &str,
        covered: Option<&NullBuffer>,
    ) -> Result<(ArrayRef, Misfits), Error> {
        let (converted, mut misfits) = self.values(array, field.data_type(), path)?;
        misfits.retain(|(place, _)| covered.is_none_or(|covered| covered.is_valid(*place)));
        if !field.is_nullable() && converted.null_count() > 0 {
            let missing =
                misfit(ReasonCode::MissingValue, path, "null, but the column may not be null".to_owned());
            let known: HashSet<usize> = misfits.iter().map(|(place, _)| *place).collect();
            let is_missing = |place: &usize| {
                converted.is_null(*place)
                    && covered.is_none_or(|covered| covered.is_valid(*place))
                    && !known.contains(place)
            };
            misfits.extend((0..converted.len()).filter(is_missing).map(|place| (place, missing.clone())));
        }
        Ok((converted, misfits))
    }

    fn values(&mut self, array: &ArrayRef, to: &DataType, path: &str) -> Result<(ArrayRef, Misfits), Error> {
        match (array.data_type(), to) {
            (DataType::Dictionary(..), _) => self.dictionary(array, to, path),
            (
                DataType::List(_) | DataType::LargeList(_) | DataType::FixedSizeList(..),
                DataType::List(element),
            ) => self.list(array, element, path),
            (DataType::Struct(_), DataType::Struct(fields)) => {
                self.structure(array.as_struct(), fields, path)
            }
            (DataType::Map(..), DataType::Map(entries, _)) => self.map(array.as_map(), entries, path),
            (DataType::Timestamp(unit, _), DataType::Timestamp(..)) => timestamps(array, *unit, to, path),
            (DataType::Date32, DataType::Date32) => dates(array, path),
            (DataType::Date64, DataType::Date32) => dates_from_ms(array, path),
            (from, DataType::Decimal128(precision, _)) if from == to => decimals(array, *precision, path),
            (from, to) if from == to => Ok((array.clone(), Vec::new())),
            (DataType::Utf8View, _) => {
                self.spend_views(
                    array.as_any().downcast_ref::<StringViewArray>().map(StringViewArray::views),
                )?;
                cast(array, to, path)
            }
            (DataType::BinaryView, _) => {
                self.spend_views(
                    array.as_any().downcast_ref::<BinaryViewArray>().map(BinaryViewArray::views),
                )?;
                cast(array, to, path)
            }
            (_, to) => {
                self.budget.spend(array.len().saturating_mul(to.primitive_width().unwrap_or(4)))?;
                cast(array, to, path)
            }
        }
    }

    /// Views may point at the same bytes over and over.
    fn spend_views(&mut self, views: Option<&arrow::buffer::ScalarBuffer<u128>>) -> Result<(), Error> {
        // The low half of a view's first word is its length.
        let length = |view: &u128| (*view & u128::from(u32::MAX)) as usize;
        self.budget.spend(views.map_or(0, |views| views.iter().map(length).sum()))
    }

    fn dictionary(
        &mut self,
        array: &ArrayRef,
        to: &DataType,
        path: &str,
    ) -> Result<(ArrayRef, Misfits), Error> {
        let dictionary = array.as_any_dictionary();
        let (values, bad) = self.values(dictionary.values(), to, path)?;
        let keys = normalised_keys(array)?;
        // Keys may ask for the same long value over and over.
        let width = |key: usize| match values.data_type() {
            DataType::Utf8 => values.as_string::<i32>().value_length(key).unsigned_abs() as usize + 4,
            DataType::Binary => values.as_binary::<i32>().value_length(key).unsigned_abs() as usize + 4,
            fixed => fixed.primitive_width().unwrap_or(1),
        };
        let asked = keys.iter().map(|key| key.map_or(4, |key| width(key as usize))).sum();
        self.budget.spend(asked)?;
        let taken = take(&values, &keys, None).map_err(invalid)?;
        if bad.is_empty() {
            return Ok((taken, Vec::new()));
        }
        let bad: std::collections::HashMap<usize, Rc<Misfit>> = bad.into_iter().collect();
        let hit = |(place, key): (usize, Option<u64>)| Some((place, bad.get(&(key? as usize))?.clone()));
        Ok((taken, keys.iter().enumerate().filter_map(hit).collect()))
    }

    fn list(
        &mut self,
        array: &ArrayRef,
        element: &FieldRef,
        path: &str,
    ) -> Result<(ArrayRef, Misfits), Error> {
        let list = plain_list(array)?;
        let (values, bad) = self.field(list.values(), element, &format!("{path}[]"), None)?;
        let misfits = at_rows(bad, list.value_offsets(), list.nulls());
        let field = Arc::new(Field::new(element.name(), values.data_type().clone(), true));
        let list = ListArray::try_new(field, list.offsets().clone(), values, list.nulls().cloned());
        Ok((Arc::new(list.map_err(invalid)?), misfits))
    }

    fn structure(
        &mut self,
        array: &StructArray,
        fields: &Fields,
        path: &str,
    ) -> Result<(ArrayRef, Misfits), Error> {
        let (mut columns, mut relaxed, mut misfits) = (Vec::new(), Vec::new(), Vec::new());
        for field in fields {
            let column = match array.column_by_name(field.name()) {
                Some(column) => {
                    let path = format!("{path}.{}", field.name());
                    let (column, bad) = self.field(column, field, &path, array.nulls())?;
                    misfits.extend(bad);
                    column
                }
                None => {
                    self.budget.spend(array.len().saturating_mul(null_bytes(field.data_type())))?;
                    new_null_array(field.data_type(), array.len())
                }
            };
            relaxed.push(Field::new(field.name(), column.data_type().clone(), true));
            columns.push(column);
        }
        let converted = StructArray::try_new(relaxed.into(), columns, array.nulls().cloned());
        Ok((Arc::new(converted.map_err(invalid)?), misfits))
    }

    fn map(
        &mut self,
        array: &MapArray,
        entries: &FieldRef,
        path: &str,
    ) -> Result<(ArrayRef, Misfits), Error> {
        let DataType::Struct(fields) = entries.data_type() else {
            return Err(Error::internal("a map's entries are a struct"));
        };
        let pairs = array.entries();
        let (keys, mut bad) = self.field(array.keys(), &fields[0], &format!("{path}{{}}"), pairs.nulls())?;
        let (values, bad_values) =
            self.field(array.values(), &fields[1], &format!("{path}{{}}"), pairs.nulls())?;
        bad.extend(bad_values);
        bad.sort_by_key(|(place, _)| *place);
        let misfits = at_rows(bad, array.value_offsets(), array.nulls());
        // Arrow has no map whose keys may be null, and so nobody can have sent one.
        let relaxed: Fields = vec![
            Field::new(fields[0].name(), keys.data_type().clone(), false),
            Field::new(fields[1].name(), values.data_type().clone(), true),
        ]
        .into();
        let pairs = StructArray::try_new(relaxed.clone(), vec![keys, values], None).map_err(invalid)?;
        let field = Arc::new(Field::new(entries.name(), DataType::Struct(relaxed), false));
        let map = MapArray::try_new(field, array.offsets().clone(), pairs, array.nulls().cloned(), false);
        Ok((Arc::new(map.map_err(invalid)?), misfits))
    }
}

/// Gives a converted column, without its misfits, the field's very type.
pub(super) fn settle(array: &ArrayRef, to: &DataType) -> Result<ArrayRef, ArrowError> {
    if array.data_type() == to {
        return Ok(array.clone());
    }
    match to {
        DataType::List(element) => {
            let list = array.as_list::<i32>();
            let list = if element.is_nullable() { list.clone() } else { without_uncovered(array)? };
            let values = settle(list.values(), element.data_type())?;
            let list =
                ListArray::try_new(element.clone(), list.offsets().clone(), values, list.nulls().cloned())?;
            Ok(Arc::new(list))
        }
        DataType::Struct(fields) => {
            let structure = array.as_struct();
            let columns = structure.columns().iter().zip(fields);
            let columns = columns.map(|(column, field)| settle(column, field.data_type()));
            let columns = columns.collect::<Result<_, _>>()?;
            Ok(Arc::new(StructArray::try_new(fields.clone(), columns, structure.nulls().cloned())?))
        }
        DataType::Map(entries, sorted) => {
            let map = taken_anew(array)?;
            let map = map.as_map();
            let pairs: ArrayRef = Arc::new(map.entries().clone());
            let pairs = settle(&pairs, entries.data_type())?.as_struct().clone();
            let nulls = map.nulls().cloned();
            Ok(Arc::new(MapArray::try_new(entries.clone(), map.offsets().clone(), pairs, nulls, *sorted)?))
        }
        _ => Err(ArrowError::SchemaError(format!("{} is not {to}", array.data_type()))),
    }
}

/// Only the elements that rows refer to: others may be null where no element may.
fn without_uncovered(array: &ArrayRef) -> Result<ListArray, ArrowError> {
    let list = array.as_list::<i32>();
    if list.values().null_count() == 0 {
        return Ok(list.clone());
    }
    Ok(taken_anew(array)?.as_list::<i32>().clone())
}

fn taken_anew(array: &ArrayRef) -> Result<ArrayRef, ArrowError> {
    take(array, &UInt64Array::from_iter_values(0..array.len() as u64), None)
}

fn misfit(code: ReasonCode, path: &str, message: String) -> Rc<Misfit> {
    Rc::new(Misfit { code, column: path.to_owned(), message })
}

fn out_of_range(path: &str, to: &DataType, why: &str) -> Rc<Misfit> {
    misfit(ReasonCode::OutOfRange, path, format!("the value does not fit {}: {why}", types::text(to)))
}

/// The rows to whose elements the misfits belong: the first of each.
fn at_rows(bad: Misfits, offsets: &[i32], nulls: Option<&NullBuffer>) -> Misfits {
    let mut misfits: Misfits = Vec::new();
    for (element, misfit) in bad {
        let after =
            offsets.partition_point(|offset| usize::try_from(*offset).is_ok_and(|offset| offset <= element));
        // Elements before the first row, after the last, or of a null are nobody's.
        if after == 0 || after == offsets.len() {
            continue;
        }
        let row = after - 1;
        if nulls.is_none_or(|nulls| nulls.is_valid(row))
            && misfits.last().is_none_or(|(last, _)| *last != row)
        {
            misfits.push((row, misfit));
        }
    }
    misfits
}

fn normalised_keys(array: &ArrayRef) -> Result<UInt64Array, Error> {
    let keys = array.as_any_dictionary().keys();
    let keys: ArrayRef = keys.slice(0, keys.len());
    let strict = CastOptions { safe: false, ..CastOptions::default() };
    let keys = cast_with_options(&keys, &DataType::UInt64, &strict).map_err(invalid)?;
    Ok(keys.as_primitive::<arrow::datatypes::UInt64Type>().clone())
}

fn plain_list(array: &ArrayRef) -> Result<ListArray, Error> {
    let (DataType::LargeList(field) | DataType::FixedSizeList(field, _)) = array.data_type() else {
        return Ok(array.as_list::<i32>().clone());
    };
    if let Some(fixed) = array.as_any().downcast_ref::<FixedSizeListArray>() {
        let size = fixed.value_length();
        let count = i32::try_from(fixed.len()).ok().filter(|count| count.checked_mul(size).is_some());
        let count =
            count.ok_or_else(|| invalid("a list column with more elements than a table's lists can have"))?;
        let offsets: Vec<i32> = (0..=count).map(|row| row * size).collect();
        let offsets = arrow::buffer::OffsetBuffer::new(offsets.into());
        let list = ListArray::try_new(field.clone(), offsets, fixed.values().clone(), fixed.nulls().cloned());
        return list.map_err(invalid);
    }
    let large = array.as_list::<i64>();
    let offsets: Result<Vec<i32>, _> =
        large.value_offsets().iter().map(|offset| i32::try_from(*offset)).collect();
    let offsets = arrow::buffer::OffsetBuffer::new(offsets.map_err(invalid)?.into());
    ListArray::try_new(field.clone(), offsets, large.values().clone(), large.nulls().cloned())
        .map_err(invalid)
}

/// Casts; what overflows becomes null and a misfit.
fn cast(array: &ArrayRef, to: &DataType, path: &str) -> Result<(ArrayRef, Misfits), Error> {
    let converted = cast_with_options(array, to, &CastOptions::default()).map_err(invalid)?;
    let misfits = if converted.null_count() == array.null_count() {
        Vec::new()
    } else {
        let misfit = out_of_range(path, to, "out of range");
        let is_new = |place: &usize| converted.is_null(*place) && array.is_valid(*place);
        (0..array.len()).filter(is_new).map(|place| (place, misfit.clone())).collect()
    };
    Ok((converted, misfits))
}

fn misfits_where(array: &dyn Array, misfit: &Rc<Misfit>, fits: impl Fn(usize) -> bool) -> Misfits {
    let bad = |place: &usize| !fits(*place) && array.is_valid(*place);
    (0..array.len()).filter(bad).map(|place| (place, misfit.clone())).collect()
}

fn timestamps(
    array: &ArrayRef,
    unit: TimeUnit,
    to: &DataType,
    path: &str,
) -> Result<(ArrayRef, Misfits), Error> {
    let misfit = || out_of_range(path, to, "outside of the years 1 to 9999, or finer than a microsecond");
    // A zone says how to show an instant: the number is the same in all of them.
    let raw = arrow::array::make_array(
        array.to_data().into_builder().data_type(DataType::Int64).build().map_err(invalid)?,
    );
    let raw = raw.as_primitive::<Int64Type>();
    let in_us = |value: i64| {
        let us = match unit {
            TimeUnit::Second => value.checked_mul(1_000_000)?,
            TimeUnit::Millisecond => value.checked_mul(1_000)?,
            TimeUnit::Microsecond => value,
            TimeUnit::Nanosecond => (value % 1_000 == 0).then_some(value / 1_000)?,
        };
        timestamp_in_range(us)
    };
    if unit == TimeUnit::Microsecond && raw.values().iter().all(|us| timestamp_in_range(*us).is_some()) {
        let typed = arrow::array::PrimitiveArray::<TimestampMicrosecondType>::new(
            raw.values().clone(),
            raw.nulls().cloned(),
        );
        return Ok((Arc::new(typed.with_data_type(to.clone())), Vec::new()));
    }
    let converted = raw.unary_opt::<_, TimestampMicrosecondType>(in_us).with_data_type(to.clone());
    let misfits = if converted.null_count() == raw.null_count() {
        Vec::new()
    } else {
        misfits_where(raw, &misfit(), |place| converted.is_valid(place))
    };
    Ok((Arc::new(converted), misfits))
}

fn dates(array: &ArrayRef, path: &str) -> Result<(ArrayRef, Misfits), Error> {
    let days = array.as_primitive::<Date32Type>();
    let fits = |day: i32| date_in_range(i64::from(day)).is_some();
    if days.values().iter().all(|day| fits(*day)) {
        return Ok((array.clone(), Vec::new()));
    }
    let misfit = out_of_range(path, &DataType::Date32, "outside of the years 1 to 9999");
    Ok((array.clone(), misfits_where(days, &misfit, |place| fits(days.value(place)))))
}

fn dates_from_ms(array: &ArrayRef, path: &str) -> Result<(ArrayRef, Misfits), Error> {
    const DAY_MS: i64 = DAY_US / 1_000;
    let ms = array.as_primitive::<Date64Type>();
    let day = |ms: i64| if ms % DAY_MS == 0 { date_in_range(ms / DAY_MS) } else { None };
    let converted = ms.unary_opt::<_, Date32Type>(day);
    let misfit = out_of_range(path, &DataType::Date32, "outside of the years 1 to 9999, or not a whole day");
    let misfits = misfits_where(ms, &misfit, |place| converted.is_valid(place));
    Ok((Arc::new(converted), misfits))
}

fn decimals(array: &ArrayRef, precision: u8, path: &str) -> Result<(ArrayRef, Misfits), Error> {
    let values = array.as_primitive::<Decimal128Type>();
    let limit = 10_u128.pow(u32::from(precision));
    let fits = |value: i128| value.unsigned_abs() < limit;
    if values.values().iter().all(|value| fits(*value)) {
        return Ok((array.clone(), Vec::new()));
    }
    let misfit = out_of_range(path, array.data_type(), "more digits than the precision");
    Ok((array.clone(), misfits_where(values, &misfit, |place| fits(values.value(place)))))
}
