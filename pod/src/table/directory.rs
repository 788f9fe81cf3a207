//! Names of the directories that partition values make: short enough for every file system.
//!
//! *Owns*: when `column=value` gives way to a stand-in, and what that looks like.
//! *Does not own*: how names and values are escaped (Delta's kernel), the values themselves: they stand in the log.

use std::borrow::Cow;
use std::hash::{DefaultHasher, Hash, Hasher};

/// What file systems take for one name.
const NAME_BYTES_MAX: usize = 255;
/// All of it. Linux takes 4096 for a whole path, of which the tables' root and the table's own name have their part.
const DIRECTORY_BYTES_MAX: usize = 1024;

/// A table's directory for some partition values, URL-encoded, as Delta's convention has it (`column=value/…/`) where
/// file systems take that. It is a convention only: the log says which values a file has. A stand-in has no `=`, since
/// a reader that goes by paths would take it for a value, and names of one directory's files stay together.
pub(super) fn bounded(directory: &str) -> Cow<'_, str> {
    let names = || directory.split_terminator('/');
    if names().all(|name| stored_bytes(name) <= NAME_BYTES_MAX)
        && stored_bytes(directory) <= DIRECTORY_BYTES_MAX
    {
        return Cow::Borrowed(directory);
    }
    let bounded = |name| match stored_bytes(name) <= NAME_BYTES_MAX {
        true => format!("{name}/"),
        false => stand_in(name),
    };
    let bounded: String = names().map(bounded).collect();
    Cow::Owned(if stored_bytes(&bounded) <= DIRECTORY_BYTES_MAX { bounded } else { stand_in(directory) })
}

/// Whether the directory tells the values of all partition columns.
pub(super) fn tells_values(directory: &str) -> bool {
    directory.split_terminator('/').all(|name| name.contains('='))
}

/// Two values with one stand-in do no harm: their files differ in name.
fn stand_in(name: &str) -> String {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    format!("values-{:016x}/", hasher.finish())
}

/// Bytes without the URL's encoding, which makes three of one.
fn stored_bytes(encoded: &str) -> usize {
    encoded.len() - 2 * encoded.matches('%').count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_stays_as_it_is() {
        for directory in [String::new(), "p=a%2525/q=b/".to_owned(), format!("p={}/", "%C3".repeat(253))] {
            assert_eq!(bounded(&directory), directory.as_str());
            assert!(tells_values(&directory));
        }
    }

    #[test]
    fn what_is_too_long_gives_way_and_nothing_else_does() {
        let check = |directory: &str, kept: &str, names: usize| {
            let short = bounded(directory);
            assert!(short.starts_with(kept), "{short}");
            assert_eq!(short.split_terminator('/').count(), names, "{short}");
            assert!(short.split_terminator('/').all(|name| stored_bytes(name) <= NAME_BYTES_MAX), "{short}");
            assert!(stored_bytes(&short) <= DIRECTORY_BYTES_MAX);
            assert!(!tells_values(&short), "{short}");
            assert_eq!(short, bounded(directory), "always the same");
        };
        check(&format!("p={}/", "x".repeat(254)), "values-", 1);
        check(&format!("p=a/q={}/", "x".repeat(5000)), "p=a/values-", 2);
        check(&format!("p={}/", "%C3".repeat(254)), "values-", 1);
        check(&format!("p={}/", "x".repeat(200)).repeat(6), "values-", 1);
        assert_ne!(bounded(&"x".repeat(300)), bounded(&"y".repeat(300)));
    }
}
