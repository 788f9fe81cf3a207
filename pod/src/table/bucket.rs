//! What a bucket of S3 answers that refuses, or does not answer, in words: what is wrong, and how it is mended.
//!
//! *Owns*: these words, and which refusals will never pass by themselves.
//! *Does not own*: the store (`place`), when it is asked.

use std::error::Error as _;

/// Longest piece of an answer that is shown, in characters.
const SHOWN_CHARS: usize = 200;
/// Where credentials of the machine's role are asked for where the environment has none.
const METADATA: [&str; 2] = ["169.254.169.254", "169.254.170.2"];

/// Where a bucket is asked, as far as its errors are about that.
#[derive(Debug, Clone)]
pub(super) struct Asked {
    pub(super) bucket: String,
    /// None is Amazon's.
    pub(super) endpoint: Option<String>,
    pub(super) region: Option<String>,
    /// Whether the environment has credentials, or says where they are.
    pub(super) has_credentials: bool,
}

/// What is wrong, for people.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Explained {
    pub(super) text: String,
    /// It does not pass by itself: to ask again is of no use.
    pub(super) stays: bool,
}

impl Asked {
    /// What an error means.
    pub(super) fn explain(&self, error: &object_store::Error) -> Explained {
        let mut said = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            let more = error.to_string();
            if !said.contains(&more) {
                said = format!("{said}: {more}");
            }
            cause = error.source();
        }
        self.explain_text(&said)
    }

    fn explain_text(&self, said: &str) -> Explained {
        let Self { bucket, endpoint, region, has_credentials } = self;
        let at = endpoint.as_deref().unwrap_or("Amazon's S3");
        let region = region.as_deref().unwrap_or("us-east-1, as none is set");
        let stays = |text: String| Explained { text, stays: true };
        let code = element(said, "Code").unwrap_or_default();
        let shown = match (code, element(said, "Message")) {
            ("", _) => without_markup(said),
            (code, Some(message)) => format!("{code}: {message}"),
            (code, None) => code.to_owned(),
        };
        let shown: String = shown.chars().take(SHOWN_CHARS).collect();
        let no_credentials = "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run where a role \
             gives them (AWS_WEB_IDENTITY_TOKEN_FILE, or that of the machine)";
        match code {
            "NoSuchBucket" => stays(format!(
                "there is no bucket {bucket:?} at {at} ({shown}): make it, or name another one; AWS_ENDPOINT says where to ask"
            )),
            "InvalidAccessKeyId"
            | "SignatureDoesNotMatch"
            | "InvalidToken"
            | "ExpiredToken"
            | "TokenRefreshRequired" => stays(format!(
                "{at} does not take these credentials for bucket {bucket:?} ({shown}): see AWS_ACCESS_KEY_ID, \
                 AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN"
            )),
            "AccessDenied" | "AllAccessDisabled" => stays(format!(
                "{at} lets these credentials not into bucket {bucket:?} ({shown}): they need to list it, and to read, write and \
                 delete objects below the prefix; see AWS_ACCESS_KEY_ID, or the role's policy"
            )),
            "PermanentRedirect" | "AuthorizationHeaderMalformed" | "IllegalLocationConstraintException" => {
                stays(format!(
                    "bucket {bucket:?} is not in region {region} of {at} ({shown}): set AWS_REGION to its own"
                ))
            }
            _ if METADATA.iter().any(|host| said.contains(host)) && !has_credentials => {
                stays(no_credentials.to_owned())
            }
            "" if is_unreached(said) => Explained {
                text: format!("cannot reach {at} ({shown}): see AWS_ENDPOINT, and AWS_REGION ({region})"),
                stays: false,
            },
            _ => Explained { text: format!("{at} says of bucket {bucket:?}: {shown}"), stays: false },
        }
    }

    /// What is said where nothing has come in time.
    pub(super) fn silent(&self) -> String {
        let at = self.endpoint.as_deref().unwrap_or("Amazon's S3");
        let hint = match self.has_credentials {
            true => "see AWS_ENDPOINT and AWS_REGION",
            false => {
                "there are no credentials in the environment: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, unless a role \
                 of this machine gives them; and see AWS_ENDPOINT"
            }
        };
        format!("{at} does not answer for bucket {:?}: {hint}", self.bucket)
    }
}

fn is_unreached(said: &str) -> bool {
    let said = said.to_lowercase();
    ["connect", "dns", "resolve", "timed out", "error sending request"].iter().any(|word| said.contains(word))
}

/// The text of the first element of this name.
fn element<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    rest.split_once(&format!("</{name}>")).map(|(text, _)| text.trim())
}

/// A page of markup says nothing that people want to read.
fn without_markup(text: &str) -> String {
    text.split_once('<').map_or(text, |(before, _)| before).trim().trim_end_matches(':').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explained(said: &str, has_credentials: bool) -> Explained {
        let endpoint = Some("http://127.0.0.1:9000".to_owned());
        let region = Some("eu-central-1".to_owned());
        Asked { bucket: "lake".to_owned(), endpoint, region, has_credentials }.explain_text(said)
    }

    #[test]
    fn refusals_say_what_to_mend_and_show_no_markup() {
        let xml = |code: &str| {
            format!(
                "Generic S3 error: Server returned non-2xx status code: 404 Not Found: <?xml version=\"1.0\"?><Error>\
                 <Code>{code}</Code><Message>words</Message></Error>"
            )
        };
        for (code, stays, words) in [
            ("NoSuchBucket", true, ["no bucket \"lake\"", "AWS_ENDPOINT"]),
            ("SignatureDoesNotMatch", true, ["AWS_SECRET_ACCESS_KEY", "does not take"]),
            ("AccessDenied", true, ["lets these credentials not", "policy"]),
            ("AuthorizationHeaderMalformed", true, ["AWS_REGION", "eu-central-1"]),
            ("SlowDown", false, ["SlowDown: words", "http://127.0.0.1:9000"]),
        ] {
            let Explained { text, stays: told } = explained(&xml(code), true);
            assert_eq!(told, stays, "{text}");
            words.iter().for_each(|word| assert!(text.contains(word), "{word:?} is not in {text}"));
            assert!(!text.contains('<') && text.contains("words"), "{text}");
        }
    }

    #[test]
    fn a_store_that_is_not_there_and_credentials_that_are_not_are_told_apart() {
        let role = "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 3s, after 2 retries";
        let none = explained(role, false);
        assert!(none.stays && none.text.contains("AWS_ACCESS_KEY_ID"), "{none:?}");
        let away = explained("Generic S3 error: error sending request: tcp connect error: refused", true);
        assert!(!away.stays && away.text.contains("cannot reach http://127.0.0.1:9000"), "{away:?}");
        assert!(away.text.contains("AWS_ENDPOINT"), "{away:?}");
        let page = explained("Generic S3 error: 502 Bad Gateway: <html><body>no</body></html>", true);
        assert!(page.text.ends_with("502 Bad Gateway"), "{page:?}");
    }
}
