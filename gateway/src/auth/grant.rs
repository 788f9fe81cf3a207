//! Grants: which tables, and what may be done with them.
//!
//! *Owns*: privileges, patterns of table names, whether grants allow something.
//! *Does not own*: whose grants they are (`config`), how they travel (`token`).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sluice_shared::ids::TableName;

/// What may be done with a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Privilege {
    /// Send records.
    Write,
    /// Make the table, by hand or from first records.
    Create,
    /// See that it is there, its columns and its state.
    Describe,
}

impl fmt::Display for Privilege {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Write => "write",
            Self::Create => "create",
            Self::Describe => "describe",
        })
    }
}

/// Names of tables: `catalog.schema.table`, completed from `main.default` as any name. Each part is a name, or ends with
/// `*` for all that begin so.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TablePattern {
    /// Begins and whether they may go on, of catalog, schema and table.
    parts: [Part; 3],
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    begins: String,
    goes_on: bool,
}

impl TablePattern {
    /// This table alone.
    pub(crate) fn only(table: &TableName) -> Self {
        let mut parts = table.as_str().split('.').map(str::to_owned);
        let mut next = || Part { begins: parts.next().unwrap_or_default(), goes_on: false };
        Self { parts: [next(), next(), next()] }
    }

    pub(crate) fn matches(&self, table: &TableName) -> bool {
        let mut names = table.as_str().split('.');
        self.parts.iter().all(|part| names.next().is_some_and(|name| part.matches(name)))
    }
}

impl Part {
    fn matches(&self, name: &str) -> bool {
        name.strip_prefix(self.begins.as_str()).is_some_and(|rest| self.goes_on || rest.is_empty())
    }
}

/// Not a pattern of table names.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0:?} is no pattern of table names: write catalog.schema.table, each part a name (A-Z a-z 0-9 _) that may end \
     with `*`, such as main.default.* or main.*.sensor_*"
)]
pub struct InvalidPattern(String);

impl FromStr for TablePattern {
    type Err = InvalidPattern;

    fn from_str(text: &str) -> Result<Self, InvalidPattern> {
        let invalid = || InvalidPattern(text.chars().take(200).collect());
        // A name's own rules hold for what the stars leave, and complete it.
        let stars: Vec<bool> = text.split('.').map(|part| part.ends_with('*')).collect();
        // What a short pattern with a star would be completed to is not what its author thinks.
        if stars.contains(&true) && stars.len() < 3 {
            return Err(invalid());
        }
        let named = text.split('.').map(|part| match part.strip_suffix('*') {
            Some("") => "_",
            Some(begins) => begins,
            None => part,
        });
        let table: TableName = named.collect::<Vec<_>>().join(".").parse().map_err(|_| invalid())?;
        let mut pattern = Self::only(&table);
        let skipped = pattern.parts.len() - stars.len();
        for ((part, written), star) in pattern.parts[skipped..].iter_mut().zip(text.split('.')).zip(stars) {
            if star {
                part.begins.truncate(written.len() - 1);
                part.goes_on = true;
            }
        }
        Ok(pattern)
    }
}

impl fmt::Display for TablePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, Part { begins, goes_on }) in self.parts.iter().enumerate() {
            write!(f, "{}{begins}{}", if at > 0 { "." } else { "" }, if *goes_on { "*" } else { "" })?;
        }
        Ok(())
    }
}

impl TryFrom<String> for TablePattern {
    type Error = InvalidPattern;

    fn try_from(text: String) -> Result<Self, InvalidPattern> {
        text.parse()
    }
}

impl From<TablePattern> for String {
    fn from(pattern: TablePattern) -> Self {
        pattern.to_string()
    }
}

/// Some privileges on some tables.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grant {
    /// Which tables, such as `main.default.*`.
    pub tables: TablePattern,
    /// What may be done with them.
    pub privileges: Vec<Privilege>,
}

/// Whether these grants allow it.
pub(crate) fn allow(grants: &[Grant], table: &TableName, privilege: Privilege) -> bool {
    grants.iter().any(|grant| grant.privileges.contains(&privilege) && grant.tables.matches(table))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(pattern: &str, matching: &[&str], others: &[&str]) {
        let pattern: TablePattern = pattern.parse().expect(pattern);
        let matches = |name: &&str| pattern.matches(&name.parse().expect(name));
        assert!(matching.iter().all(matches), "{pattern}: {matching:?}");
        assert!(!others.iter().any(matches), "{pattern}: {others:?}");
    }

    #[test]
    fn a_pattern_is_a_name_whose_parts_may_end_with_a_star() {
        check(
            "flights",
            &["flights", "main.default.flights"],
            &["flights2", "main.ops.flights", "a.default.flights"],
        );
        check("main.default.*", &["x"], &["main.ops.x", "other.default.x"]);
        check("main.*.sensor_*", &["sensor_1", "main.ops.sensor_"], &["main.ops.sensor", "x.ops.sensor_1"]);
        check("*.*.*", &["x", "a.b.c"], &[]);
    }

    #[test]
    fn what_is_no_pattern_is_refused_with_what_is_one() {
        for text in [
            "",
            "a..b",
            "**",
            "a*b",
            "*a",
            "a.b.c.d",
            "a/*",
            "a b",
            "main.default.",
            "naïve*",
            "*",
            "t*",
            "main.*",
        ] {
            let error = text.parse::<TablePattern>().expect_err(text).to_string();
            assert!(error.contains("such as main.default.*"), "{error}");
        }
    }

    #[test]
    fn a_pattern_is_written_as_it_is_read() {
        for text in ["main.default.*", "a.b*.c", "*.*.*"] {
            assert_eq!(text.parse::<TablePattern>().expect(text).to_string(), text);
        }
        assert_eq!("t".parse::<TablePattern>().expect("valid").to_string(), "main.default.t");
    }

    #[test]
    fn a_privilege_counts_where_its_own_grant_matches() {
        let grant = |tables: &str, privilege| Grant {
            tables: tables.parse().expect("valid"),
            privileges: vec![privilege],
        };
        let grants = [grant("a.b.*", Privilege::Write), grant("a.c.*", Privilege::Describe)];
        let table = |name: &str| name.parse::<TableName>().expect("valid");
        assert!(allow(&grants, &table("a.b.x"), Privilege::Write));
        assert!(!allow(&grants, &table("a.b.x"), Privilege::Describe));
        assert!(!allow(&grants, &table("a.c.x"), Privilege::Write));
    }
}
