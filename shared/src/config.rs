//! Configuration: sizes with units, and one way to load a documented struct from a TOML file and the environment.
//!
//! *Owns*: parsing, merging (defaults, file, `SLUICE_…` environment, then flags by the caller), unknown keys.
//! *Does not own*: the structs; each program has one, with a `validate`.

mod places;

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use places::Places;

use crate::fault;

/// A number of bytes, written like `64MiB`, `10MB` or `4096`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "ByteSizeText", into = "String")]
pub struct ByteSize(pub u64);

#[derive(Deserialize)]
#[serde(untagged)]
enum ByteSizeText {
    Number(u64),
    Text(String),
}

/// Variables (without `SLUICE_`) that commands read as flags: what must not stand on a command line, where all users of a
/// machine see it.
const OF_COMMANDS: [&str; 4] = ["CLIENT_ID", "CLIENT_SECRET", "TOKEN", "ADMIN_SECRET"];
/// Names the directory of faults (`fault`), in programs that have any.
const FAULTS: &str = "FAULTS";

const UNITS: [(&str, u64); 9] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("B", 1),
];

impl ByteSize {
    /// `n` MiB.
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// As an index or length in memory.
    pub fn as_usize(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

impl FromStr for ByteSize {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let text = text.trim();
        let (number, unit) = UNITS
            .iter()
            .find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)))
            .unwrap_or((text, 1));
        let bytes = number.trim().parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
        bytes.map(Self).ok_or_else(|| ConfigError::Size(text.to_owned()))
    }
}

impl TryFrom<ByteSizeText> for ByteSize {
    type Error = ConfigError;

    fn try_from(text: ByteSizeText) -> Result<Self, ConfigError> {
        match text {
            ByteSizeText::Number(bytes) => Ok(Self(bytes)),
            ByteSizeText::Text(text) => text.parse(),
        }
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS[..4].iter().rev().find(|(_, unit)| self.0 >= *unit && self.0.is_multiple_of(*unit));
        match unit {
            Some((name, unit)) => write!(f, "{}{name}", self.0 / unit),
            None => write!(f, "{}B", self.0),
        }
    }
}

impl fmt::Debug for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<ByteSize> for String {
    fn from(size: ByteSize) -> Self {
        size.to_string()
    }
}

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// No number of bytes.
    #[error("{0:?} is not a size: write a whole number of bytes, or one with a unit, such as 64MiB")]
    Size(String),
    /// The file cannot be read.
    #[error("cannot read configuration {path}")]
    Read {
        /// Which file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// Not TOML, a wrong type, or an unknown key.
    #[error("configuration {origin}: {message}")]
    Parse {
        /// Which file or variable.
        origin: String,
        /// Why, with the line, and the nearest known key for an unknown one.
        message: String,
    },
    /// Values that do not fit together.
    #[error("{0}")]
    Relation(String),
}

/// A configuration, and which keys were set for it.
#[derive(Debug)]
pub struct Loaded<T> {
    /// The configuration.
    pub config: T,
    /// Where its keys were set.
    pub places: Places,
    set: toml::Table,
}

impl<T> Loaded<T> {
    /// Whether the file or the environment sets `section.key`, be it to its default.
    pub fn sets(&self, section: &str, key: &str) -> bool {
        self.set.get(section).is_some_and(|section| section.get(key).is_some())
    }
}

/// Loads a configuration: the file where there is one, with the environment on top. Keys that are set
/// nowhere keep their defaults (`#[serde(default, deny_unknown_fields)]` on the struct).
///
/// `SLUICE_WAL__SEGMENT_BYTES=64MiB` sets `segment_bytes` in `[wal]`; values are TOML where they parse as
/// such, text otherwise. `sections` are the sections that there are.
///
/// # Errors
/// An unreadable file, broken TOML, wrong types, unknown keys and variables.
pub fn load<T: DeserializeOwned>(file: Option<&Path>, sections: &[&str]) -> Result<Loaded<T>, ConfigError> {
    merge(file, sections, environment())
}

/// Refuses variables that begin with `SLUICE_` and set nothing, for programs that read no configuration.
///
/// # Errors
/// Names the variable, and the one that was probably meant.
pub fn check_environment(sections: &[&str]) -> Result<(), ConfigError> {
    environment().iter().try_for_each(|(key, _)| section_of(key, sections).map(|_| ()))
}

/// Refuses what cannot be the address of a listener: it has to be `HOST:PORT`.
///
/// # Errors
/// `Relation`, naming the key.
pub fn check_listen(key: &str, listen: &str) -> Result<(), ConfigError> {
    let parts = listen.rsplit_once(':').filter(|(host, port)| is_host(host) && port.parse::<u16>().is_ok());
    let advice = "expected HOST:PORT, such as 127.0.0.1:7070 or [::]:7070";
    parts.map(|_| ()).ok_or_else(|| ConfigError::Relation(format!("{key} is {listen:?}: {advice}")))
}

/// A name, or an address, where colons stand within brackets alone.
fn is_host(host: &str) -> bool {
    match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        // Behind a `%` comes the interface of a link-local address.
        Some(address) => address.split('%').next().is_some_and(|ip| ip.parse::<std::net::Ipv6Addr>().is_ok()),
        None => !host.is_empty() && !host.contains([':', '/', ' ', '[', ']', '@']),
    }
}

/// Whether two listeners of one protocol want one port. Names other than `localhost` are taken for addresses of their own.
pub fn is_clash(one: &str, other: &str) -> bool {
    let (Some((host, port)), Some((other_host, other_port))) = (one.rsplit_once(':'), other.rsplit_once(':'))
    else {
        return false;
    };
    let plain = |host: &str| if host == "localhost" { "127.0.0.1".to_owned() } else { host.to_owned() };
    let is_all = |host: &str| matches!(host, "0.0.0.0" | "[::]");
    let is_same = plain(host) == plain(other_host) || is_all(host) || is_all(other_host);
    port == other_port && port != "0" && is_same
}

fn merge<T: DeserializeOwned>(
    file: Option<&Path>,
    sections: &[&str],
    variables: Vec<(String, String)>,
) -> Result<Loaded<T>, ConfigError> {
    let mut places = Places::default();
    let mut set_keys = match file {
        None => toml::Table::new(),
        Some(path) => {
            let origin = path.display().to_string();
            let text = std::fs::read_to_string(path)
                .map_err(|source| ConfigError::Read { path: origin.clone(), source })?;
            // Read into the struct as well, so that an error names the line.
            toml::from_str::<T>(&text).map_err(|error| parse_error(&origin, &error))?;
            places = Places::of_file(&origin, &text);
            toml::from_str(&text).map_err(|error| parse_error(&origin, &error))?
        }
    };
    for (key, value) in variables {
        let Some(path) = section_of(&key, sections)? else { continue };
        let mut alone = toml::Table::new();
        set(&mut alone, &path, value.clone());
        // Read by itself as well, so that an error names the variable.
        T::deserialize(toml::Value::Table(alone))
            .map_err(|error| parse_error(&format!("variable SLUICE_{key}"), &error))?;
        if let [section, key, ..] = &path[..] {
            places.set(section, key, format!("variable SLUICE_{}", path.join("__").to_ascii_uppercase()));
        }
        set(&mut set_keys, &path, value);
    }
    let config = T::deserialize(toml::Value::Table(set_keys.clone()))
        .map_err(|error| parse_error("(file and environment)", &error))?;
    Ok(Loaded { config, places, set: set_keys })
}

#[allow(clippy::disallowed_methods, reason = "the one place that reads the environment")]
fn environment() -> Vec<(String, String)> {
    std::env::vars_os()
        .filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?)))
        .filter_map(|(key, value)| Some((key.strip_prefix("SLUICE_")?.to_owned(), value)))
        .collect()
}

/// The directory of faults, where the process has one.
#[cfg(any(debug_assertions, feature = "faults"))]
pub(crate) fn faults_dir() -> Option<std::path::PathBuf> {
    environment().into_iter().find(|(key, _)| key == FAULTS).map(|(_, dir)| dir.into())
}

/// Where a variable (without `SLUICE_`) sets a value: section and key. None for what an orchestrator sets.
fn section_of(key: &str, sections: &[&str]) -> Result<Option<Vec<String>>, ConfigError> {
    let path: Vec<String> = key.split("__").map(str::to_ascii_lowercase).collect();
    if path.len() > 1 && sections.contains(&path[0].as_str()) {
        return Ok(Some(path));
    }
    let is_of_faults = fault::COMPILED_IN && key == FAULTS;
    if OF_COMMANDS.contains(&key) || is_of_faults || is_service_address(key) {
        return Ok(None);
    }
    let advice = match meant(&key.to_ascii_lowercase(), sections) {
        Some(variable) => format!("did you mean `{variable}`?"),
        None => {
            let all: Vec<String> = sections.iter().map(|section| variable(section, "…")).collect();
            format!("known are {}", all.join(", "))
        }
    };
    let message = format!("it sets nothing: {advice}");
    Err(ConfigError::Parse { origin: format!("variable SLUICE_{key}"), message })
}

/// The variable that was probably meant: one underscore for two, or a section slightly misspelt.
fn meant(key: &str, sections: &[&str]) -> Option<String> {
    const DISTANCE_MAX: usize = 2;
    let of_section = |section: &&str| key.strip_prefix(section).and_then(|rest| rest.strip_prefix('_'));
    if let Some((section, rest)) = sections.iter().find_map(|section| Some((section, of_section(section)?))) {
        return Some(variable(section, rest));
    }
    let (first, rest) = key.split_once("__").unwrap_or((key, "…"));
    let nearest = sections.iter().min_by_key(|section| distance(first, section))?;
    (distance(first, nearest) <= DISTANCE_MAX).then(|| variable(nearest, rest))
}

fn variable(section: &str, key: &str) -> String {
    format!("SLUICE_{}__{}", section.to_ascii_uppercase(), key.to_ascii_uppercase())
}

/// Kubernetes tells each container the addresses of services: of one called `sluice` as `SLUICE_PORT` and the like.
fn is_service_address(key: &str) -> bool {
    let ends = ["PORT", "SERVICE_HOST", "SERVICE_PORT"];
    let has = ["SERVICE_PORT_", "_TCP", "_UDP", "_SCTP"];
    !key.contains("__")
        && (ends.iter().any(|end| key.ends_with(end)) || has.iter().any(|part| key.contains(part)))
}

fn set(table: &mut toml::Table, path: &[String], text: String) {
    let [key, rest @ ..] = path else { return };
    if rest.is_empty() {
        let parsed = toml::from_str::<toml::Table>(&format!("value = {text}"));
        let value = parsed.ok().and_then(|mut table| table.remove("value"));
        table.insert(key.clone(), value.unwrap_or(toml::Value::String(text)));
        return;
    }
    let below = table.entry(key.clone()).or_insert_with(|| toml::Value::Table(toml::Table::new()));
    if let toml::Value::Table(below) = below {
        set(below, rest, text);
    }
}

fn parse_error(origin: &str, error: &toml::de::Error) -> ConfigError {
    let mut message = error.to_string().trim_end().to_owned();
    if let Some(nearest) = nearest_known(&message) {
        message.push_str(&format!("\ndid you mean `{nearest}`?"));
    }
    ConfigError::Parse { origin: origin.to_owned(), message }
}

/// From serde's ``unknown field `x`, expected one of `a`, `b` ``, the expected one that is nearest to `x`.
fn nearest_known(message: &str) -> Option<&str> {
    let rest = &message[message.find("unknown field")?..];
    let mut quoted = rest.split('`').skip(1).step_by(2);
    let unknown = quoted.next()?;
    quoted.min_by_key(|known| distance(unknown, known)).filter(|known| distance(unknown, known) <= 4)
}

/// Levenshtein's edit distance (V. Levenshtein, 1966), by rows.
pub(crate) fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[derive(Debug, Default, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    #[allow(dead_code, reason = "only its parsing is tested")]
    struct Sample {
        segment_bytes: Option<ByteSize>,
        lanes: u32,
    }

    fn loaded(text: &str) -> Result<Sample, ConfigError> {
        let mut file = tempfile::NamedTempFile::new().expect("temporary file");
        file.write_all(text.as_bytes()).expect("written");
        load(Some(file.path()), &[]).map(|loaded| loaded.config)
    }

    #[derive(Debug, Default, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    struct Sections {
        pod: Sample,
    }

    fn with_variable(key: &str, value: &str) -> Result<Loaded<Sections>, ConfigError> {
        merge(None, &["gateway", "pod"], vec![(key.to_owned(), value.to_owned())])
    }

    #[test]
    fn a_variable_that_sets_nothing_is_refused_with_the_nearest_one() {
        for (key, advice) in [
            ("POD_SEGMENT_BYTES", "did you mean `SLUICE_POD__SEGMENT_BYTES`?"),
            ("PODS__LANES", "did you mean `SLUICE_POD__LANES`?"),
            ("URL", "known are SLUICE_GATEWAY__…, SLUICE_POD__…"),
            ("POD", "did you mean `SLUICE_POD__…`?"),
        ] {
            let error = with_variable(key, "1").expect_err(key).to_string();
            assert!(error.contains(&format!("variable SLUICE_{key}: ")), "{error}");
            assert!(error.contains(advice), "{error}");
        }
        let error = with_variable("POD__LANE", "1").expect_err("unknown key").to_string();
        assert!(error.contains("variable SLUICE_POD__LANE: ") && error.contains("`lanes`?"), "{error}");
        let error = with_variable("POD__LANES", "many").expect_err("no number").to_string();
        assert!(error.contains("variable SLUICE_POD__LANES: "), "{error}");
    }

    #[test]
    fn what_an_orchestrator_or_a_command_sets_is_none_of_ours() {
        for key in [
            "CLIENT_ID",
            "CLIENT_SECRET",
            "TOKEN",
            "PORT",
            "PORT_7070_TCP_ADDR",
            "SERVICE_HOST",
            "GATEWAY_SERVICE_PORT_HTTP",
            "POD_0_PORT",
        ] {
            with_variable(key, "tcp://10.0.0.1:7070").expect(key);
        }
    }

    #[test]
    fn addresses_of_listeners_are_told_from_what_is_none() {
        for listen in ["127.0.0.1:0", "[::1]:7070", "gateway:1", "localhost:65535"] {
            check_listen("gateway.listen", listen).expect(listen);
        }
        for listen in ["", "7070", ":7070", "::1:7070", "[::g]:1", "h:65536", "h:-1", "http://h:1", "h:1:2"] {
            let error = check_listen("gateway.listen", listen).expect_err(listen).to_string();
            assert!(error.contains("gateway.listen is") && error.contains("expected HOST:PORT"), "{error}");
        }
        for (one, other, expected) in [
            ("127.0.0.1:7", "127.0.0.1:7", true),
            ("localhost:7", "127.0.0.1:7", true),
            ("[::]:7", "127.0.0.1:7", true),
            ("10.0.0.1:7", "127.0.0.1:7", false),
            ("127.0.0.1:7", "127.0.0.1:8", false),
            ("127.0.0.1:0", "127.0.0.1:0", false),
        ] {
            assert_eq!((is_clash(one, other), is_clash(other, one)), (expected, expected), "{one} {other}");
        }
    }

    #[test]
    fn what_is_set_is_known_from_what_is_default() {
        let loaded = with_variable("POD__LANES", "0").expect("valid");
        assert_eq!((loaded.sets("pod", "lanes"), loaded.sets("pod", "segment_bytes")), (true, false));
        assert_eq!(loaded.config.pod.lanes, 0);
    }

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [("64MiB", 64 << 20), ("10MB", 10_000_000), ("4096", 4096), ("1 GiB", 1 << 30)] {
            assert_eq!(text.parse::<ByteSize>().expect(text).0, bytes);
        }
        assert!("-1".parse::<ByteSize>().is_err());
        assert!("99999999TiB".parse::<ByteSize>().is_err());
        assert_eq!(ByteSize(3 << 20).to_string(), "3MiB");
    }

    #[test]
    fn an_unknown_key_is_refused_with_the_nearest_known_one() {
        let error = loaded("lanes = 2\nsegment_byte = '1MiB'\n").expect_err("unknown key").to_string();
        assert!(error.contains("did you mean `segment_bytes`?"), "{error}");
        assert!(error.contains("line 2"), "{error}");
    }

    #[test]
    fn missing_keys_keep_their_defaults() {
        let sample = loaded("segment_bytes = '1MiB'\n").expect("valid");
        assert_eq!((sample.segment_bytes, sample.lanes), (Some(ByteSize::mib(1)), 0));
    }
}
