//! Where each key of a configuration was set: what is wrong with its value is mended there.
//!
//! *Owns*: the places, and finding the one that a complaint is about.
//! *Does not own*: what the keys mean, and which of them go together.

use std::collections::BTreeMap;

use toml::de::DeTable;

/// Where keys were set: lines of the file, variables, flags.
#[derive(Debug, Clone, Default)]
pub struct Places {
    /// By `section.key`.
    of: BTreeMap<String, String>,
}

impl Places {
    /// Those of a TOML file. What cannot be parsed has none: it was refused before, by its line.
    pub(super) fn of_file(origin: &str, text: &str) -> Self {
        let mut places = Self::default();
        let Ok(table) = DeTable::parse(text) else { return places };
        for (section, keys) in table.get_ref() {
            let Some(keys) = keys.get_ref().as_table() else { continue };
            for (key, _) in keys {
                let line = 1 + text[..key.span().start].matches('\n').count();
                places.set(section.get_ref(), key.get_ref(), format!("{origin}, line {line}"));
            }
        }
        places
    }

    /// A key is set somewhere else, which counts from now on.
    pub fn set(&mut self, section: &str, key: &str, place: String) {
        self.of.insert(format!("{section}.{key}"), place);
    }

    /// A complaint, behind the place of the first key in it that was set anywhere: those that have their defaults are
    /// what the others do not fit.
    pub fn name(&self, complaint: &str) -> String {
        let mut words = complaint.split(|c: char| !(c.is_ascii_alphanumeric() || "._".contains(c)));
        match words.find_map(|word| self.of.get(word.trim_end_matches('.'))) {
            Some(place) => format!("{place}: {complaint}"),
            None => complaint.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_complaint_is_named_by_the_key_that_was_set() {
        let text = "[pod]\n# of ours\nlanes = 1\n\n[gateway]\nlisten = 'x'\n[[gateway.pods]]\nid = 'a'\n";
        let mut places = Places::of_file("sluice.toml", text);
        places.set("pod", "id", "variable SLUICE_POD__ID".to_owned());
        for (complaint, expected) in [
            ("pod.lanes is 1", "sluice.toml, line 3: pod.lanes is 1"),
            ("gateway.listen is 'x'", "sluice.toml, line 6: gateway.listen is 'x'"),
            ("pods of gateway.pods.", "sluice.toml, line 7: pods of gateway.pods."),
            (
                "pod.memory_bytes (default) with pod.lanes",
                "sluice.toml, line 3: pod.memory_bytes (default) with pod.lanes",
            ),
            ("pod.id, no", "variable SLUICE_POD__ID: pod.id, no"),
            ("pod.lane", "pod.lane"),
        ] {
            assert_eq!(places.name(complaint), expected);
        }
        places.set("gateway", "listen", "--listen".to_owned());
        assert_eq!(places.name("gateway.listen"), "--listen: gateway.listen");
    }
}
