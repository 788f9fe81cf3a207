//! Bearer tokens: JSON Web Tokens (RFC 7519), signed with a key that all gateways of a service have.
//!
//! A token says who, on which tables, what, and until when; whoever has the key can judge it, and nothing is kept.
//! One algorithm, HS256, is signed and taken; a token that names another one, or none, is refused before its signature is
//! looked at.
//!
//! *Owns*: the key and its file, making and judging tokens, how long they hold.
//! *Does not own*: who may have one (`auth`), what grants mean (`grant`).

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Once;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use jsonwebtoken::crypto::{CryptoProvider, JwtSigner, JwtVerifier, KeyUtils};
use jsonwebtoken::errors::{Error as JwtError, ErrorKind as JwtErrorKind};
use jsonwebtoken::signature::{self, Signer, Verifier};
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation};
use ring::hmac;
use serde::{Deserialize, Serialize};
use sluice_shared::error::Error;

use super::grant::Grant;
use super::secret::{RANDOM_BYTES, hex, random_bytes};
use crate::files::check_secret;

/// Clocks of gateways differ: a token holds from this long before its time on, and this long after it. A stream that is
/// open when its token ends goes on for as long.
pub(crate) const GRACE: Duration = Duration::from_secs(60);
/// Who made the token, and for whom.
const ISSUER: &str = "sluice";
const AUDIENCE: &str = "sluice-gateway";
/// Longest token that is looked at; those made here are shorter, so that they fit into a request's headers.
const TOKEN_CHARS_MAX: usize = 8 << 10;

/// What a token says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claims {
    iss: String,
    aud: String,
    /// The client.
    pub(crate) sub: String,
    /// Made at, and valid from and until: seconds since 1970.
    iat: u64,
    nbf: u64,
    exp: u64,
    pub(crate) grants: Vec<Grant>,
}

/// The key of a service's tokens.
pub(crate) struct TokenKey {
    encoding: EncodingKey,
    decoding: DecodingKey,
}

impl TokenKey {
    /// Reads the key's file: 32 bytes in hex or base64.
    ///
    /// # Errors
    /// `Invalid`, naming the file and what is wrong with it, but nothing of what is in it.
    pub(crate) fn read(file: &Path) -> Result<Self, Error> {
        let invalid = |why: String| {
            Error::invalid("invalid_token_key", format!("gateway.token_key, {}: {why}", file.display()))
        };
        check_secret(file).map_err(invalid)?;
        let text = fs::read_to_string(file).map_err(|error| invalid(error.to_string()))?;
        let what = "expected 32 random bytes in hex or base64, such as `openssl rand -hex 32` makes";
        Self::new(&key_bytes(text.trim()).ok_or_else(|| invalid(what.to_owned()))?)
    }

    pub(crate) fn new(bytes: &[u8; RANDOM_BYTES]) -> Result<Self, Error> {
        install_provider();
        let failed = |error: JwtError| Error::internal(format!("token key: {error}"));
        Ok(Self {
            encoding: EncodingKey::from_secret(bytes).map_err(failed)?,
            decoding: DecodingKey::from_secret(bytes).map_err(failed)?,
        })
    }

    /// A token for a client, from now on.
    ///
    /// # Errors
    /// `Invalid` where it would be too long for a header.
    pub(crate) fn make(
        &self,
        client: &str,
        grants: Vec<Grant>,
        now: u64,
        life: Duration,
    ) -> Result<String, Error> {
        let (iss, aud, exp) = (ISSUER.to_owned(), AUDIENCE.to_owned(), now.saturating_add(life.as_secs()));
        let claims = Claims { iss, aud, sub: client.to_owned(), iat: now, nbf: now, exp, grants };
        let made = jsonwebtoken::encode(&Header::new(Algorithm::HS256), &claims, &self.encoding);
        let token = made.map_err(|error| Error::internal(format!("cannot make a token: {error}")))?;
        if token.len() > TOKEN_CHARS_MAX {
            let message = "the grants are too many for one token: ask for the tables that it is for \
                           (authorization_details), or give the client fewer patterns";
            return Err(Error::invalid("token_too_long", message));
        }
        Ok(token)
    }

    /// What a token says, and for how long it holds.
    ///
    /// # Errors
    /// `Unauthorized`: what is wrong with it, but nothing of it.
    pub(crate) fn judge(&self, token: &str, now: u64) -> Result<(Claims, Duration), Error> {
        let invalid =
            |why: &str| Error::unauthorized("token_invalid", format!("the token is not valid: {why}"));
        if token.len() > TOKEN_CHARS_MAX {
            return Err(invalid("it is too long"));
        }
        let mut validation = Validation::new(Algorithm::HS256);
        validation.set_issuer(&[ISSUER]);
        validation.set_audience(&[AUDIENCE]);
        validation.set_required_spec_claims(&["iss", "aud", "sub", "exp", "nbf"]);
        // Below, against the clock that is passed in.
        (validation.validate_exp, validation.validate_nbf) = (false, false);
        let decoded = jsonwebtoken::decode::<Claims>(token, &self.decoding, &validation);
        let claims = decoded.map_err(|error| invalid(why(error.kind())))?.claims;
        let grace = GRACE.as_secs();
        if claims.nbf > now.saturating_add(grace) {
            return Err(invalid("its time has not come yet; do the clocks of the gateways agree?"));
        }
        match claims.exp.saturating_add(grace).checked_sub(now) {
            None | Some(0) => {
                Err(Error::unauthorized("token_expired", "the token has expired: ask for a new one"))
            }
            Some(left) => Ok((claims, Duration::from_secs(left))),
        }
    }
}

fn why(kind: &JwtErrorKind) -> &'static str {
    match kind {
        JwtErrorKind::InvalidSignature => "its signature is not one of this service",
        JwtErrorKind::InvalidAlgorithm | JwtErrorKind::InvalidAlgorithmName => "it is not signed with HS256",
        JwtErrorKind::InvalidIssuer | JwtErrorKind::InvalidAudience => {
            "it was made by, or for, another service"
        }
        JwtErrorKind::MissingRequiredClaim(_) => "it lacks a claim that tokens of this service have",
        _ => "it is no token of this service, or only a part of one",
    }
}

fn key_bytes(text: &str) -> Option<[u8; RANDOM_BYTES]> {
    let unpadded = text.trim_end_matches('=');
    let base64 = || STANDARD_NO_PAD.decode(unpadded).or_else(|_| URL_SAFE_NO_PAD.decode(unpadded)).ok();
    hex(text).or_else(|| base64()?.try_into().ok())
}

/// Makes the file of a key where there is none.
///
/// # Errors
/// `Invalid` where it cannot be written.
pub fn make_token_key(file: &Path) -> Result<(), Error> {
    let failed = |error: &std::io::Error| {
        Error::invalid("invalid_token_key", format!("cannot make {}: {error}", file.display()))
    };
    file.parent().map_or(Ok(()), fs::create_dir_all).map_err(|error| failed(&error))?;
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(file);
    let mut opened = match made {
        Ok(opened) => opened,
        Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(()),
        Err(error) => return Err(failed(&error)),
    };
    let text: String = random_bytes()?.iter().map(|byte| format!("{byte:02x}")).collect();
    let written = writeln!(opened, "{text}").and_then(|()| opened.sync_all());
    written.map_err(|error| failed(&error))?;
    tracing::info!(file = %file.display(), "made a key for tokens");
    Ok(())
}

/// HMAC-SHA256 by ring, which TLS has in the tree already.
struct Hs256(hmac::Key);

impl Hs256 {
    fn new(algorithm: &Algorithm, secret: &[u8]) -> Result<Self, JwtError> {
        match algorithm {
            Algorithm::HS256 => Ok(Self(hmac::Key::new(hmac::HMAC_SHA256, secret))),
            _ => Err(JwtErrorKind::InvalidAlgorithm.into()),
        }
    }
}

impl Signer<Vec<u8>> for Hs256 {
    fn try_sign(&self, message: &[u8]) -> Result<Vec<u8>, signature::Error> {
        Ok(hmac::sign(&self.0, message).as_ref().to_vec())
    }
}

impl Verifier<Vec<u8>> for Hs256 {
    /// In constant time.
    fn verify(&self, message: &[u8], signature: &Vec<u8>) -> Result<(), signature::Error> {
        hmac::verify(&self.0, message, signature).map_err(|_| signature::Error::new())
    }
}

impl JwtSigner for Hs256 {
    fn algorithm(&self) -> Algorithm {
        Algorithm::HS256
    }
}

impl JwtVerifier for Hs256 {
    fn algorithm(&self) -> Algorithm {
        Algorithm::HS256
    }
}

fn install_provider() {
    static INSTALLED: Once = Once::new();
    static PROVIDER: CryptoProvider = CryptoProvider {
        signer_factory: |algorithm, key| Ok(Box::new(Hs256::new(algorithm, key.as_bytes())?)),
        verifier_factory: |algorithm, key| Ok(Box::new(Hs256::new(algorithm, key.try_get_as_bytes()?)?)),
        key_utils: KeyUtils::new_unimplemented(),
    };
    // Another one of the process is as good: it knows HS256 too.
    INSTALLED.call_once(|| {
        let _ = PROVIDER.install_default();
    });
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use serde_json::{Value, json};

    use std::os::unix::fs::MetadataExt;

    use super::*;

    const NOW: u64 = 1_800_000_000;
    const KEY: [u8; 32] = [7; 32];

    fn key() -> TokenKey {
        TokenKey::new(&KEY).expect("a key")
    }

    fn claims() -> Value {
        let grants = json!([{ "tables": "main.default.*", "privileges": ["write"] }]);
        json!({ "iss": "sluice", "aud": "sluice-gateway", "sub": "plant-7", "iat": NOW, "nbf": NOW,
                "exp": NOW + 3600, "grants": grants })
    }

    /// Made without the code under test.
    fn signed(header: &Value, claims: &Value, key: &[u8]) -> String {
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let text = format!("{}.{}", part(header), part(claims));
        let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes());
        format!("{text}.{}", URL_SAFE_NO_PAD.encode(tag))
    }

    fn hs256() -> Value {
        json!({ "alg": "HS256", "typ": "JWT" })
    }

    fn check_refused(case: &str, token: &str, code: &str, says: &str) {
        let error = key().judge(token, NOW).expect_err(case);
        assert_eq!((error.code.as_str(), error.retryable), (code, false), "{case}: {error}");
        assert!(error.message.contains(says), "{case}: {error}");
        assert_eq!(error.kind, sluice_shared::error::ErrorKind::Unauthorized);
    }

    #[test]
    fn a_token_is_what_other_tools_make_of_it() {
        let grants: Vec<Grant> = serde_json::from_value(claims()["grants"].clone()).expect("grants");
        let made = key().make("plant-7", grants.clone(), NOW, Duration::from_secs(3600)).expect("made");
        for token in [made, signed(&hs256(), &claims(), &KEY)] {
            let (claims, left) = key().judge(&token, NOW + 3000).expect("valid");
            assert_eq!((claims.sub.as_str(), claims.grants), ("plant-7", grants.clone()));
            assert_eq!(left, Duration::from_secs(660));
        }
    }

    #[test]
    fn tokens_of_others_are_refused() {
        let good = signed(&hs256(), &claims(), &KEY);
        let unsigned =
            |token: &str| token.rsplit_once('.').map(|(rest, _)| format!("{rest}.")).expect("a token");
        let none = signed(&json!({ "alg": "none" }), &claims(), &KEY);
        let invalid = |case: &str, token: &str, says: &str| check_refused(case, token, "token_invalid", says);
        invalid("alg none", &none, "");
        invalid("alg none, no signature", &unsigned(&none), "");
        invalid("alg NONE", &signed(&json!({ "alg": "NONE" }), &claims(), &KEY), "");
        for alg in ["HS384", "HS512", "RS256", "ES256", "EdDSA"] {
            invalid(alg, &signed(&json!({ "alg": alg }), &claims(), &KEY), "HS256");
        }
        invalid("no signature", &unsigned(&good), "signature");
        invalid("another key", &signed(&hs256(), &claims(), &[8; 32]), "signature");
        let other = signed(&hs256(), &json!({ "grants": [] }), &KEY);
        let (head, tag) = (good.rsplit_once('.').expect("dots").0, other.rsplit_once('.').expect("dots").1);
        invalid("the signature of another", &format!("{head}.{tag}"), "signature");
        for cut in [0, 1, 10, good.find('.').expect("a dot"), good.len() - 1] {
            invalid(&format!("cut at {cut}"), &good[..cut], "");
        }
        invalid("no token at all", "sluice_secret_x", "");
        invalid("too long", &"a".repeat(10_000), "too long");
    }

    #[test]
    fn claims_are_checked_one_by_one() {
        let with = |key: &str, value: Value| {
            let mut claims = claims();
            claims[key] = value;
            signed(&hs256(), &claims, &KEY)
        };
        check_refused("another issuer", &with("iss", json!("other")), "token_invalid", "another service");
        check_refused("another audience", &with("aud", json!("other")), "token_invalid", "another service");
        check_refused("not yet", &with("nbf", json!(NOW + 61)), "token_invalid", "not come yet");
        check_refused("expired", &with("exp", json!(NOW - 60)), "token_expired", "expired");
        check_refused("expired long ago", &with("exp", json!(0)), "token_expired", "expired");
        for claim in ["iss", "aud", "sub", "exp", "nbf", "grants"] {
            check_refused(claim, &with(claim, Value::Null), "token_invalid", "");
            let mut without = claims();
            without.as_object_mut().expect("an object").remove(claim);
            check_refused(claim, &signed(&hs256(), &without, &KEY), "token_invalid", "");
        }
        key().judge(&with("nbf", json!(NOW + 60)), NOW).expect("within the difference of clocks");
        key().judge(&with("exp", json!(NOW - 59)), NOW).expect("within the difference of clocks");
        key().judge(&with("exp", json!(u64::MAX)), NOW).expect("no overflow");
    }

    #[test]
    fn more_grants_than_a_header_takes_are_refused() {
        let grant = Grant { tables: "main.default.*".parse().expect("valid"), privileges: vec![] };
        let error = key().make("a", vec![grant; 500], NOW, Duration::from_secs(1)).expect_err("too long");
        assert_eq!(error.code, "token_too_long");
    }

    #[test]
    fn keys_are_read_in_hex_and_base64_and_never_from_an_open_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("made/token.key");
        make_token_key(&file).expect("made");
        let first = fs::read_to_string(&file).expect("readable");
        make_token_key(&file).expect("there already");
        assert_eq!(fs::read_to_string(&file).expect("readable"), first);
        assert_eq!(fs::metadata(&file).expect("there").mode() & 0o777, 0o600);
        let url_safe = URL_SAFE_NO_PAD.encode([0xfb; 32]);
        for text in [first.as_str(), "BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc=\n", &url_safe] {
            fs::write(&file, text).expect("written");
            TokenKey::read(&file).expect(text);
        }
        for text in ["", "07", &"x".repeat(64), &first.trim()[1..]] {
            fs::write(&file, text).expect("written");
            let error = TokenKey::read(&file).err().expect("refused").to_string();
            assert!(error.contains("gateway.token_key") && error.contains("openssl rand"), "{error}");
        }
        fs::write(&file, &first).expect("written");
        for (mode, readable) in [(0o600, true), (0o400, true), (0o440, true), (0o644, false), (0o660, false)]
        {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).expect("set");
            assert_eq!(TokenKey::read(&file).is_ok(), readable, "{mode:o}");
        }
    }
}
