//! What a request says, read with bounds; what is wrong in it becomes a problem that names the field.

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt as _, Limited};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::api::{Problem, Refusal, RefusalCode};
use crate::config::MAX_FILE;
use crate::deadlines::API_CLIENT;

/// An answer in JSON.
pub(super) struct Json<T>(pub(super) T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        match serde_json::to_vec(&self.0) {
            Ok(text) => {
                ([(CONTENT_TYPE, HeaderValue::from_static("application/json"))], text).into_response()
            }
            Err(error) => Refusal::failed(error).into_response(),
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        Problem::from(self).into_response()
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let media = HeaderValue::from_static("application/problem+json");
        match serde_json::to_vec(&self) {
            Ok(text) => (status, [(CONTENT_TYPE, media)], text).into_response(),
            Err(_) => status.into_response(),
        }
    }
}

/// A part of the request is not what it should be.
fn wrong<E: std::fmt::Display>(part: &str, error: serde_path_to_error::Error<E>) -> Refusal {
    // A path of nothing is written as a dot, and one of what can't be read as a question mark. It may be as long as the request.
    let field = Some(error.path().to_string()).filter(|field| !matches!(&**field, "." | "?"));
    let field = field.map(|field| field.chars().take(64).collect::<String>());
    let place = field.as_ref().map_or_else(|| part.to_owned(), |field| format!("`{field}` in {part}"));
    let refusal =
        Refusal::new(RefusalCode::Invalid, format_args!("{place} is not as it should be: {}", error.inner()));
    Refusal { field, ..refusal }
}

/// What the request's query says.
pub(super) struct Query<T>(pub(super) T);

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Refusal> {
        let text = parts.uri.query().unwrap_or_default();
        let pairs = serde_html_form::Deserializer::from_bytes(text.as_bytes());
        serde_path_to_error::deserialize(pairs).map(Self).map_err(|error| wrong("the query", error))
    }
}

/// What the request's body says. None at all is an empty object.
pub(super) struct Sent<T>(pub(super) T);

impl<T: DeserializeOwned, S: Sync> FromRequest<S> for Sent<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Self, Refusal> {
        let body: Limited<Body> = Limited::new(request.into_body(), MAX_FILE);
        let refused = |text: String| Refusal::new(RefusalCode::Invalid, text);
        let body = tokio::time::timeout(API_CLIENT, body.collect()).await;
        let body =
            body.map_err(|_| refused(format!("the body did not come within {} s", API_CLIENT.as_secs())))?;
        let body =
            body.map_err(|error| refused(format!("the body can't be read: {error}; it may have 1 MiB")))?;
        let body = body.to_bytes();
        let text: &[u8] = if body.is_empty() { b"{}" } else { &body };
        let mut json = serde_json::Deserializer::from_slice(text);
        let value = serde_path_to_error::deserialize(&mut json).map_err(|error| wrong("the body", error))?;
        json.end().map_err(|error| refused(format!("the body is not one JSON value: {error}")))?;
        Ok(Self(value))
    }
}
