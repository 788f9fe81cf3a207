//! Which columns of a file repeat their values so much that Parquet's dictionary pays. It is looked up for every value, and where
//! most values are new ones that is half of what a file costs, for a larger file.
//!
//! *Owns*: how often values come again, by a sample of the first rows.
//! *Does not own*: the other settings of a file (`parquet`).

use std::collections::HashSet;

use arrow::array::{Array, ArrayRef, RecordBatch, UInt64Array};
use arrow::compute::take_arrays;
use arrow::error::ArrowError;
use arrow::row::{RowConverter, SortField};
use parquet::file::properties::DEFAULT_DICTIONARY_PAGE_SIZE_LIMIT;

/// Rows that are looked at: of 20,000 different values six or seven come twice among so many.
const SAMPLE: usize = 512;
/// A value is to come so often, at least.
const TIMES_MIN: f64 = 4.0;
/// A larger dictionary is given up by the writer, when most of the work is done.
const BYTES_MAX: f64 = DEFAULT_DICTIONARY_PAGE_SIZE_LIMIT as f64;

/// Names of the columns for which a dictionary does not pay in a row group of about `group_rows`, of which `rows` are the first.
/// Nested columns are not looked into.
///
/// # Errors
/// Arrow's, for a type it has no rows of.
pub(super) fn without(rows: &RecordBatch, group_rows: usize) -> Result<Vec<String>, ArrowError> {
    let schema = rows.schema();
    let all = schema.fields().iter().zip(rows.columns());
    let (fields, columns): (Vec<_>, Vec<_>) = all
        .filter(|(field, _)| !field.data_type().is_nested())
        .map(|(field, column)| (field, ArrayRef::clone(column)))
        .unzip();
    let mut dear = Vec::new();
    for (field, column) in fields.into_iter().zip(sample(&columns, rows.num_rows())?) {
        if !pays(&column, group_rows)? {
            dear.push(field.name().clone());
        }
    }
    Ok(dear)
}

/// Rows at even distances: neighbours are often alike where the column is not.
fn sample(columns: &[ArrayRef], rows: usize) -> Result<Vec<ArrayRef>, ArrowError> {
    if rows <= SAMPLE {
        return Ok(columns.to_vec());
    }
    let places = (0..SAMPLE).map(|number| (number * rows / SAMPLE) as u64);
    take_arrays(columns, &UInt64Array::from_iter_values(places), None)
}

fn pays(sample: &ArrayRef, group_rows: usize) -> Result<bool, ArrowError> {
    if sample.is_empty() {
        return Ok(true);
    }
    let converter = RowConverter::new(vec![SortField::new(sample.data_type().clone())])?;
    let values = converter.convert_columns(&[ArrayRef::clone(sample)])?;
    let distinct = values.iter().collect::<HashSet<_>>().len();
    let all = distinct_of(distinct, sample.len(), group_rows);
    let value_bytes = sample.to_data().get_slice_memory_size()? as f64 / sample.len() as f64;
    Ok(all * TIMES_MIN <= group_rows as f64 && all * value_bytes <= BYTES_MAX)
}

/// How many different values there are, about, where `distinct` are among `sampled`: as many pairs of equal ones are expected
/// as birthdays that fall together.
fn distinct_of(distinct: usize, sampled: usize, of: usize) -> f64 {
    let again = sampled - distinct;
    if sampled >= of || again >= sampled / 2 {
        return distinct as f64;
    }
    (sampled as f64).powi(2) / (2.0 * (again as f64).max(0.5))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{BooleanArray, Int64Array, ListArray, StringArray};
    use arrow::datatypes::Int32Type;
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    fn without_of(column: ArrayRef, group_rows: usize) -> bool {
        let rows = RecordBatch::try_from_iter([("column", column)]).expect("a batch");
        !without(&rows, group_rows).expect("it can be sampled").is_empty()
    }

    fn random(rows: usize, of: i64) -> ArrayRef {
        let mut random = StdRng::seed_from_u64(7);
        Arc::new(Int64Array::from_iter_values((0..rows).map(|_| random.random_range(0..of))))
    }

    #[test]
    fn values_that_hardly_come_again_have_no_dictionary() {
        let texts = |of: i64| -> ArrayRef {
            let mut random = StdRng::seed_from_u64(8);
            Arc::new(StringArray::from_iter_values(
                (0..8192).map(|_| format!("5e8e5d0b-2f61-4c2c-b1d3-{:012}", random.random_range(0..of))),
            ))
        };
        let counted: ArrayRef = Arc::new(Int64Array::from_iter_values(0..8192));
        for (rows, column) in [
            ("in order", Arc::clone(&counted)),
            ("of two million", random(8192, 2_000_000)),
            ("texts, each another", texts(i64::MAX)),
            // 48 bytes each.
            ("texts that fill more than a page", texts(60_000)),
        ] {
            assert!(without_of(column, 400_000), "{rows}");
        }
        assert!(!without_of(texts(8), 400_000));
        assert!(!without_of(random(8192, 1_000), 400_000));
    }

    #[test]
    fn as_many_values_as_devices_have_one_where_rows_are_many() {
        let devices = random(8192, 20_000);
        assert!(!without_of(Arc::clone(&devices), 400_000));
        assert!(without_of(devices, 30_000));
    }

    #[test]
    fn a_small_file_is_judged_by_all_its_values() {
        assert!(without_of(random(100, i64::MAX), 100));
        assert!(!without_of(random(100, 10), 100));
        assert!(without_of(Arc::new(StringArray::from(vec!["one"])), 1));
    }

    #[test]
    fn nulls_and_nothing_and_nested_values_are_no_trouble() {
        assert!(!without_of(Arc::new(Int64Array::new_null(1000)), 1000));
        assert!(!without_of(Arc::new(BooleanArray::from(vec![true; 1000])), 1000));
        assert!(!without_of(Arc::new(Int64Array::new_null(0)), 0));
        for rows in [100, 1000] {
            let lists = (0..rows).map(|number| Some(vec![Some(number)]));
            let lists = ListArray::from_iter_primitive::<Int32Type, _, _>(lists);
            assert!(!without_of(Arc::new(lists), 100));
        }
    }

    #[test]
    fn the_number_of_values_is_guessed_within_a_factor() {
        for of in [50, 500, 5_000, 20_000] {
            let sampled = sample(&[random(100_000, of)], 100_000).expect("a sample");
            let ids: HashSet<_> =
                sampled[0].to_data().buffers()[0].typed_data::<i64>().iter().copied().collect();
            let guessed = distinct_of(ids.len(), SAMPLE, 100_000);
            assert!((0.4..2.5).contains(&(guessed / of as f64)), "{guessed} for {of}");
        }
    }
}
