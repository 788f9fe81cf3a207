//! Clients' secrets: made here, kept elsewhere, known to a gateway by their hash alone.
//!
//! A secret is 256 random bits, so that a plain SHA-256 of it says nothing: only what people choose needs a slow hash.
//!
//! *Owns*: the form of a secret and of its hash, comparing them.
//! *Does not own*: whose secret it is (`config`).

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Serialize};
use sluice_shared::error::Error;
use subtle::ConstantTimeEq;

/// What every secret begins with, so that scanners of code and logs find those that got there.
pub const SECRET_PREFIX: &str = "sluice_secret_";
/// Of a secret and of a key.
pub(crate) const RANDOM_BYTES: usize = 32;

/// Bytes that nobody can guess.
///
/// # Errors
/// `Internal` where the system has no randomness to give.
pub(crate) fn random_bytes() -> Result<[u8; RANDOM_BYTES], Error> {
    let mut bytes = [0; RANDOM_BYTES];
    let filled = SystemRandom::new().fill(&mut bytes);
    filled.map_err(|_| Error::internal("the operating system gives no random bytes"))?;
    Ok(bytes)
}

/// A new secret for a client.
///
/// # Errors
/// `Internal` where the system has no randomness to give.
pub fn make_secret() -> Result<String, Error> {
    Ok(format!("{SECRET_PREFIX}{}", URL_SAFE_NO_PAD.encode(random_bytes()?)))
}

/// SHA-256 of a secret, in hex. What is none is read too, and equals no secret's: an error of the parser would show it,
/// and it may be the secret itself.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct SecretHash(Option<[u8; 32]>);

impl SecretHash {
    /// That of `secret`.
    pub fn of(secret: &str) -> Self {
        let digest = ring::digest::digest(&ring::digest::SHA256, secret.as_bytes());
        Self(digest.as_ref().try_into().ok())
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.0.is_some()
    }
}

/// Takes the same time whatever is compared.
impl PartialEq for SecretHash {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Some(one), Some(other)) => one.ct_eq(other).into(),
            (one, other) => one.is_none() && other.is_none(),
        }
    }
}

impl Eq for SecretHash {}

/// 32 bytes from 64 hex digits.
pub(crate) fn hex(text: &str) -> Option<[u8; 32]> {
    let digits: Option<Vec<u8>> =
        text.chars().map(|digit| digit.to_digit(16).and_then(|digit| u8::try_from(digit).ok())).collect();
    let bytes: Vec<u8> =
        digits?.chunks(2).map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit)).collect();
    (text.len() == 64).then(|| bytes.try_into().ok()).flatten()
}

impl fmt::Display for SecretHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().flatten().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for SecretHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(a hash)")
    }
}

impl From<String> for SecretHash {
    fn from(text: String) -> Self {
        Self(hex(&text))
    }
}

impl From<SecretHash> for String {
    fn from(hash: SecretHash) -> Self {
        hash.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_that_of_other_tools() {
        // As `printf %s abc | sha256sum` has it.
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(SecretHash::of("abc").to_string(), expected);
        assert!(SecretHash::from(expected.to_owned()) == SecretHash::of("abc"));
        assert!(SecretHash::of("abd") != SecretHash::of("abc"));
    }

    #[test]
    fn what_is_no_hash_is_that_of_no_secret() {
        for text in ["", "abc", &"a".repeat(63), &"a".repeat(65), &"g".repeat(64), &"é".repeat(32)] {
            let hash = SecretHash::from(text.to_owned());
            assert!(!hash.is_valid() && hash != SecretHash::of(text), "{text}");
        }
    }

    #[test]
    fn secrets_are_recognisable_and_never_the_same() {
        let (one, other) = (make_secret().expect("random"), make_secret().expect("random"));
        assert_ne!(one, other);
        assert!(one.starts_with("sluice_secret_") && one.len() == SECRET_PREFIX.len() + 43, "{}", one.len());
    }
}
