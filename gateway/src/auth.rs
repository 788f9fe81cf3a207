//! Who may do what: a credential becomes an access, and an access a yes or no to one table.
//!
//! Every stream is checked in one place, `session::run`, before a pod hears of it; what HTTP asks of tables in one
//! other, the extractor of `edge::http`. Nothing here looks whether a table exists, so that no answer, and no answer's
//! time, tells of it.
//!
//! *Owns*: judging credentials, handing out tokens, the words of refusals.
//! *Does not own*: where a credential stands in a request (`edge`), the clients' list (`config`).

mod grant;
mod secret;
mod token;

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use sluice_shared::error::Error;
use sluice_shared::ids::TableName;
use sluice_shared::lifecycle::now_us;

use crate::config::{AuthMode, GatewayConfig};
pub use grant::{Grant, Privilege, TablePattern};
pub use secret::{SECRET_PREFIX, SecretHash, make_secret};
use token::TokenKey;
pub use token::make_token_key;

/// What a producer presents. Its text is in no log: it has no other form than its own.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Credential(Given);

#[derive(Clone, Default, PartialEq, Eq, Hash)]
enum Given {
    #[default]
    Nothing,
    Token(Arc<str>),
    /// An `Authorization` header that is no bearer token.
    Unreadable,
}

impl Credential {
    /// That of a request: `Authorization: Bearer TOKEN`. Never a URL, which gets into logs and histories.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let mut values = headers.get_all(AUTHORIZATION).iter();
        let (first, second) = (values.next(), values.next());
        let Some(value) = first else { return Self::default() };
        let text = value.to_str().ok().filter(|_| second.is_none());
        let bearer = text
            .and_then(|text| text.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        match (bearer, text) {
            (Some((_, token)), _) => Self::token(Some(token.trim())),
            (None, Some(text)) if text.trim().eq_ignore_ascii_case("bearer") => Self::default(),
            (None, _) => Self(Given::Unreadable),
        }
    }

    /// That of a stream whose `open` carries it.
    pub(crate) fn token(token: Option<&str>) -> Self {
        Self(
            token
                .filter(|token| !token.is_empty())
                .map_or(Given::Nothing, |token| Given::Token(token.into())),
        )
    }

    pub(crate) fn is_given(&self) -> bool {
        !matches!(self.0, Given::Nothing)
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_given() { "(given)" } else { "(none)" })
    }
}

/// A producer's right to its stream: claimed by its edge, granted by `session::run`, and no pod is asked before that.
#[derive(Debug, Clone)]
pub(crate) enum Right {
    Claimed(Credential),
    Granted(Permit),
}

/// What a credential allows.
pub(crate) struct Access(Option<Allowed>);

struct Allowed {
    client: String,
    grants: Vec<Grant>,
    left: Duration,
}

/// What is allowed of one table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Permit {
    /// For how long; None for ever.
    pub(crate) left: Option<Duration>,
    /// The table may be made where it does not exist.
    pub(crate) may_create: bool,
    /// Who it is; None where nobody is asked. A named stream is its own.
    pub(crate) client: Option<Arc<str>>,
}

impl Permit {
    /// As pods are told: empty where nobody is asked.
    pub(crate) fn client(&self) -> String {
        self.client.as_deref().unwrap_or_default().to_owned()
    }
}

impl Access {
    pub(crate) fn allows(&self, table: &TableName, privilege: Privilege) -> bool {
        self.0.as_ref().is_none_or(|allowed| grant::allow(&allowed.grants, table, privilege))
    }

    /// # Errors
    /// `Forbidden`, naming the privilege that is missing.
    pub(crate) fn check(&self, table: &TableName, privilege: Privilege) -> Result<Permit, Error> {
        if let Some(Allowed { client, .. }) = self.0.as_ref().filter(|_| !self.allows(table, privilege)) {
            let message = format!(
                "client {client:?} with this token lacks the privilege `{privilege}` on {table}: grant it in \
                 gateway.clients, or ask for a token that has it"
            );
            return Err(Error::forbidden("missing_privilege", message));
        }
        let left = self.0.as_ref().map(|allowed| allowed.left);
        let client = self.0.as_ref().map(|allowed| Arc::from(allowed.client.as_str()));
        Ok(Permit { left, may_create: self.allows(table, Privilege::Create), client })
    }
}

/// A token that was handed out.
pub(crate) struct Issued {
    pub(crate) token: String,
    pub(crate) expires_in: Duration,
}

/// Why none was.
#[derive(Debug)]
pub(crate) enum NotIssued {
    /// No such client, or another secret: which of them is not told.
    UnknownClient,
    /// It asks for more than it was granted.
    Lacks(Privilege, TableName),
    Failed(Error),
}

/// The one judge of credentials.
pub(crate) struct Auth {
    /// None: nobody is asked.
    tokens: Option<Tokens>,
    life: Duration,
}

struct Tokens {
    key: TokenKey,
    clients: HashMap<String, (SecretHash, Vec<Grant>)>,
    /// Compared with where there is no such client, so that it takes as long.
    nobody: SecretHash,
}

/// Reads the file of the key that signs tokens, and forgets it.
///
/// # Errors
/// `Invalid`, naming the file and what is wrong with it.
pub(crate) fn check_token_key(file: &Path) -> Result<(), Error> {
    TokenKey::read(file).map(|_| ())
}

impl Auth {
    /// # Errors
    /// `Invalid` for a configuration or key file that cannot be used.
    pub(crate) fn new(config: &GatewayConfig) -> Result<Self, Error> {
        let invalid =
            |error: crate::config::ConfigError| Error::invalid("invalid_configuration", error.to_string());
        let life = Duration::from_secs(config.token_ttl_s);
        let file = match (config.auth_mode().map_err(invalid)?, &config.token_key) {
            (AuthMode::Open, _) => {
                if let Some(listen) = config.beyond_loopback() {
                    tracing::warn!(%listen, "gateway.auth is `open`: whoever reaches it can write and read every table");
                }
                return Ok(Self { tokens: None, life });
            }
            (AuthMode::Tokens, Some(file)) => file,
            (AuthMode::Tokens, None) => return Err(Error::internal("tokens without a key were let through")),
        };
        let clients = config
            .clients
            .iter()
            .map(|client| (client.id.clone(), (client.secret_sha256, client.grants.clone())));
        let tokens =
            Tokens { key: TokenKey::read(file)?, clients: clients.collect(), nobody: SecretHash::of("") };
        Ok(Self { tokens: Some(tokens), life })
    }

    /// Who is there.
    ///
    /// # Errors
    /// `Unauthorized` without a valid token.
    pub(crate) fn access(&self, credential: &Credential) -> Result<Access, Error> {
        let Some(Tokens { key, .. }) = &self.tokens else { return Ok(Access(None)) };
        let token = match &credential.0 {
            Given::Token(token) => token,
            Given::Nothing => return Err(no_token("there is no token")),
            Given::Unreadable => {
                return Err(no_token("the Authorization header is not `Bearer TOKEN`, once"));
            }
        };
        let (claims, left) = key.judge(token, now_s())?;
        Ok(Access(Some(Allowed { client: claims.sub, grants: claims.grants, left })))
    }

    /// Whether who is there may do this.
    ///
    /// # Errors
    /// `Unauthorized` without a valid token, `Forbidden` without the privilege.
    pub(crate) fn check(
        &self,
        credential: &Credential,
        table: &TableName,
        privilege: Privilege,
    ) -> Result<Permit, Error> {
        self.access(credential)?.check(table, privilege)
    }

    /// A token for a client: for these tables, or for all that it was granted. Who may write to a table may make it too
    /// where it was granted that: there is no word for it in what is asked. An open gateway, which judges none, hands one
    /// to anybody: clients that ask for one first work as they are.
    ///
    /// # Errors
    /// See `NotIssued`.
    pub(crate) fn issue(
        &self,
        client: &str,
        secret: &str,
        wanted: Option<&[(TableName, Privilege)]>,
    ) -> Result<Issued, NotIssued> {
        let expires_in = self.life;
        let Some(Tokens { key, clients, nobody }) = &self.tokens else {
            return Ok(Issued { token: "open".to_owned(), expires_in });
        };
        let (is_known, expected, granted) = match clients.get(client) {
            Some((hash, grants)) => (true, hash, grants.as_slice()),
            None => (false, nobody, [].as_slice()),
        };
        let is_same = SecretHash::of(secret) == *expected;
        if !(is_known & is_same) {
            return Err(NotIssued::UnknownClient);
        }
        let grants = match wanted {
            None => granted.to_vec(),
            Some(wanted) => wanted
                .iter()
                .map(|(table, privilege)| narrowed(granted, table, *privilege))
                .collect::<Result<_, _>>()?,
        };
        let made = key.make(client, grants, now_s(), expires_in).map_err(NotIssued::Failed);
        Ok(Issued { token: made?, expires_in })
    }
}

fn narrowed(granted: &[Grant], table: &TableName, privilege: Privilege) -> Result<Grant, NotIssued> {
    if !grant::allow(granted, table, privilege) {
        return Err(NotIssued::Lacks(privilege, table.clone()));
    }
    let mut privileges = vec![privilege];
    if privilege == Privilege::Write && grant::allow(granted, table, Privilege::Create) {
        privileges.push(Privilege::Create);
    }
    Ok(Grant { tables: TablePattern::only(table), privileges })
}

fn now_s() -> u64 {
    u64::try_from(now_us() / 1_000_000).unwrap_or(0)
}

fn no_token(what: &str) -> Error {
    let message = format!(
        "{what}: send `Authorization: Bearer TOKEN` (or `token` in `open`); POST /oidc/v1/token gives one for a client's \
         id and secret"
    );
    Error::unauthorized("missing_token", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credential(value: &str) -> Credential {
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, value.parse().expect("a header"));
        Credential::of(&headers)
    }

    fn auth() -> Auth {
        let grants = r#"[{"tables":"a.b.*","privileges":["write","create"]},{"tables":"a.b.x","privileges":["describe"]}]"#;
        let grants: Vec<Grant> = serde_json::from_str(grants).expect("grants");
        let clients = HashMap::from([("plant".to_owned(), (SecretHash::of("s3cret"), grants))]);
        let key = TokenKey::new(&[1; 32]).expect("a key");
        let tokens = Some(Tokens { key, clients, nobody: SecretHash::of("") });
        Auth { tokens, life: Duration::from_secs(60) }
    }

    fn table(name: &str) -> TableName {
        name.parse().expect("a name")
    }

    #[test]
    fn only_one_bearer_token_is_a_credential() {
        for value in ["Bearer x.y.z", "bearer  x.y.z "] {
            assert!(matches!(&credential(value).0, Given::Token(token) if &**token == "x.y.z"), "{value}");
        }
        for value in ["Bearer", "Bearer ", "bearer   "] {
            assert!(matches!(credential(value).0, Given::Nothing), "{value}");
        }
        for value in ["Basic eDp5", "x.y.z", "Bearerx y"] {
            assert!(matches!(credential(value).0, Given::Unreadable), "{value}");
        }
        let mut twice = HeaderMap::new();
        twice.append(AUTHORIZATION, "Bearer a".parse().expect("a header"));
        twice.append(AUTHORIZATION, "Bearer b".parse().expect("a header"));
        assert!(matches!(Credential::of(&twice).0, Given::Unreadable));
        assert_eq!(format!("{:?}", credential("Bearer x.y.z")), "(given)");
    }

    #[test]
    fn a_client_gets_a_token_for_its_secret_and_nobody_else_does() {
        let auth = auth();
        for (client, secret) in
            [("plant", "s3cret "), ("plant", ""), ("nobody", ""), ("nobody", "s3cret"), ("", "")]
        {
            let refused = auth.issue(client, secret, None).err();
            assert!(matches!(refused, Some(NotIssued::UnknownClient)), "{client} {secret}");
        }
        let issued = auth.issue("plant", "s3cret", None).expect("a token");
        let access = auth.access(&Credential::token(Some(&issued.token))).expect("valid");
        assert!(
            access.allows(&table("a.b.y"), Privilege::Create)
                && access.allows(&table("a.b.x"), Privilege::Describe)
        );
        let error = access.check(&table("a.c.x"), Privilege::Write).expect_err("no grant");
        assert_eq!(error.code, "missing_privilege");
        assert!(error.message.contains("`write` on a.c.x"), "{error}");
    }

    #[test]
    fn a_token_holds_what_was_asked_for_and_no_more() {
        let auth = auth();
        let issue = |wanted: &[(&str, Privilege)]| {
            let wanted: Vec<_> = wanted.iter().map(|(name, privilege)| (table(name), *privilege)).collect();
            auth.issue("plant", "s3cret", Some(&wanted))
        };
        let issued = issue(&[("a.b.x", Privilege::Write)]).expect("granted");
        let access = auth.access(&Credential::token(Some(&issued.token))).expect("valid");
        assert!(access.check(&table("a.b.x"), Privilege::Write).expect("granted").may_create);
        for (name, privilege) in [("a.b.x", Privilege::Describe), ("a.b.y", Privilege::Write)] {
            assert!(!access.allows(&table(name), privilege), "{name} {privilege}");
        }
        let lacks =
            issue(&[("a.b.x", Privilege::Write), ("a.b.y", Privilege::Describe)]).err().expect("too much");
        assert!(
            matches!(&lacks, NotIssued::Lacks(Privilege::Describe, of) if *of == table("a.b.y")),
            "{lacks:?}"
        );
    }

    #[test]
    fn an_open_gateway_asks_nobody() {
        let auth = Auth { tokens: None, life: Duration::from_secs(1) };
        let permit = auth.check(&Credential::default(), &table("x"), Privilege::Write).expect("open");
        assert_eq!(permit, Permit { left: None, may_create: true, client: None });
        assert_eq!(auth.issue("any", "thing", None).expect("open").token, "open");
    }
}
