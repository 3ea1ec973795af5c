//! The API: what can be asked, and by which request. The router and the description are made of the same list.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use axum::body::HttpBody as _;
use axum::extract::{Path, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use axum::{Extension, Router};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};

use super::asked::{Json, Query, Sent};
use super::guests::Guests;
use super::openapi::{self, Operation};
use crate::api::{Address, AttachOptions, AttachRequest, DetachOptions, DetachRequest, StartOptions};
use crate::api::{
    AttachedDevice, DetachedDevice, GuestEvent, GuestLog, GuestStatus, ListedFunction, Problem, Refusal,
    RefusalCode, StoppedGuest,
};
use crate::guest::control::Caller;

type App = Arc<Guests>;

/// The format of the metrics.
const METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// How a guest is stopped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct StopOptions {
    /// Whether its power is cut at once, instead of having its power button pressed first.
    pub(crate) now: bool,
    /// How long it has to power itself off before its power is cut, in milliseconds.
    #[serde(deserialize_with = "crate::deadlines::milliseconds")]
    #[schemars(range(max = 86_400_000))]
    pub(crate) deadline_ms: u64,
}

impl Default for StopOptions {
    fn default() -> Self {
        Self { now: false, deadline_ms: 30_000 }
    }
}

/// Which part of a guest's log is meant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct LogOptions {
    /// Where it begins, in bytes: `next` of the part before. When left out, it is the end of the log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) from: Option<u64>,
    /// Whether that of the guest of this name before this one is meant.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) previous: bool,
}

/// A guest was reset.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub(crate) struct ResetAnswer {
    /// Its name.
    pub(crate) guest: String,
}

/// All that can be asked.
pub(super) fn operations() -> Vec<Operation<App>> {
    let op = Operation::new;
    vec![
        op("GET", "/v1/guests", "list_guests", "The guests that run", get(list))
            .answers::<Vec<GuestStatus>>(200),
        op("GET", "/v1/guests/{name}", "get_guest", "A guest that runs", get(status))
            .answers::<GuestStatus>(200),
        op(
            "PUT",
            "/v1/guests/{name}",
            "start_guest",
            "Starts a guest, and waits until it runs with its devices",
            put(start),
        )
        .asks::<StartOptions>()
        .takes_guest_file()
        .answers::<GuestStatus>(201),
        op(
            "POST",
            "/v1/guests/{name}/stop",
            "stop_guest",
            "Has a guest power itself off, or cuts its power",
            post(stop),
        )
        .asks::<StopOptions>()
        .answers::<StoppedGuest>(200),
        op("POST", "/v1/guests/{name}/reset", "reset_guest", "Resets a guest's machine", post(reset))
            .answers::<ResetAnswer>(200),
        op(
            "GET",
            "/v1/guests/{name}/log",
            "get_log",
            "The end of a guest's log, or what follows a part of it, also once the guest has ended",
            get(log),
        )
        .asks::<LogOptions>()
        .answers::<GuestLog>(200),
        op(
            "PUT",
            "/v1/guests/{name}/devices/{address}",
            "attach_device",
            "Gives a guest that runs a device",
            put(attach),
        )
        .takes::<AttachOptions>()
        .answers::<Vec<AttachedDevice>>(200),
        op(
            "DELETE",
            "/v1/guests/{name}/devices/{address}",
            "detach_device",
            "Takes a device from a guest that runs",
            delete(detach),
        )
        .asks::<DetachOptions>()
        .answers::<DetachedDevice>(200),
        op(
            "GET",
            "/v1/devices",
            "list_devices",
            "The host's accelerators, with what keeps them from guests",
            get(devices),
        )
        .answers::<Vec<ListedFunction>>(200),
        op(
            "GET",
            "/v1/devices/{address}",
            "get_device",
            "A PCI function of the host, with what keeps it from guests",
            get(device),
        )
        .answers::<ListedFunction>(200),
        op(
            "GET",
            "/v1/events",
            "events",
            "What happens to guests from now on, as server-sent events",
            get(events),
        )
        .streams::<GuestEvent>("text/event-stream"),
        op("GET", "/metrics", "metrics", "Metrics for Prometheus", get(metrics)).text(METRICS),
        op("GET", "/openapi.json", "description", "This description", get(description))
            .text("application/json"),
    ]
}

/// The API of these guests.
pub(super) fn router(guests: App) -> Router {
    let routes = operations().into_iter().fold(Router::new(), |router, operation| {
        let handler = match operation.query {
            Some(_) => operation.handler,
            None => operation.handler.route_layer(from_fn(without_query)),
        };
        let handler = match operation.body {
            Some(_) => handler,
            None => handler.route_layer(from_fn(without_body)),
        };
        router.route(operation.path, handler)
    });
    routes.layer(from_fn_with_state(guests.clone(), finish)).with_state(guests)
}

/// The query of who is asked for nothing.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

/// Refuses a query where none is known.
async fn without_query(_: Query<Nothing>, request: Request, next: Next) -> Response {
    next.run(request).await
}

/// Refuses a body where none is taken: its sender means something by it.
async fn without_body(request: Request, next: Next) -> Response {
    if request.body().is_end_stream() {
        return next.run(request).await;
    }
    let text = format!(
        "{} {} takes no body; what it takes is in the query, see /openapi.json",
        request.method(),
        request.uri().path()
    );
    Problem::from(Refusal::new(RefusalCode::Invalid, text)).into_response()
}

/// Counts a request, and makes a problem document of every answer that refuses and is none.
async fn finish(State(guests): State<App>, request: Request, next: Next) -> Response {
    let (method, path, begun) = (request.method().clone(), request.uri().path().to_owned(), Instant::now());
    let response = next.run(request).await;
    let status = response.status();
    guests.events().metrics.count_request(&method, status, begun.elapsed());
    let is_problem = |media: &HeaderValue| media == "application/problem+json";
    if status.as_u16() < 400 || response.headers().get(CONTENT_TYPE).is_some_and(is_problem) {
        return response;
    }
    let (code, text) = match status {
        StatusCode::NOT_FOUND => (RefusalCode::NotFound, format!("the API has no {path}; see /openapi.json")),
        StatusCode::METHOD_NOT_ALLOWED => {
            (RefusalCode::Invalid, format!("{path} takes no {method}; see /openapi.json"))
        }
        _ => (RefusalCode::Invalid, format!("{method} {path}: {status}")),
    };
    let problem = Problem { status: status.as_u16(), ..Refusal::new(code, text).into() };
    let (mut parts, body) = problem.into_response().into_parts();
    if let Some(allow) = response.headers().get("allow") {
        parts.headers.insert("allow", allow.clone());
    }
    Response::from_parts(parts, body)
}

/// Does what may wait, in a thread of its own.
async fn waiting<T: Send + 'static>(
    guests: App,
    act: impl FnOnce(&Guests) -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    let done = tokio::task::spawn_blocking(move || act(&guests)).await;
    done.unwrap_or_else(|_| {
        Err(Refusal::failed("the daemon made an error, which its log tells; this is a bug"))
    })
}

async fn list(State(guests): State<App>) -> Result<Json<Vec<GuestStatus>>, Refusal> {
    waiting(guests, Guests::list).await.map(Json)
}

async fn status(State(guests): State<App>, Path(name): Path<String>) -> Result<Json<GuestStatus>, Refusal> {
    waiting(guests, move |guests| guests.status(&name)).await.map(Json)
}

async fn start(
    State(guests): State<App>,
    Path(name): Path<String>,
    Query(options): Query<StartOptions>,
    Sent(file): Sent<toml::Value>,
) -> Result<(StatusCode, Json<GuestStatus>), Refusal> {
    let started = waiting(guests, move |guests| guests.start(&name, &options, file)).await?;
    Ok((StatusCode::CREATED, Json(started)))
}

async fn stop(
    State(guests): State<App>,
    Path(guest): Path<String>,
    Query(options): Query<StopOptions>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<StoppedGuest>, Refusal> {
    let stop =
        move |guests: &Guests| guests.stop(&guest, &options, &caller).map(|how| StoppedGuest { guest, how });
    waiting(guests, stop).await.map(Json)
}

async fn reset(
    State(guests): State<App>,
    Path(guest): Path<String>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<ResetAnswer>, Refusal> {
    waiting(guests, move |guests| guests.reset(&guest, &caller).map(|()| ResetAnswer { guest }))
        .await
        .map(Json)
}

async fn log(
    State(guests): State<App>,
    Path(name): Path<String>,
    Query(options): Query<LogOptions>,
) -> Result<Json<GuestLog>, Refusal> {
    waiting(guests, move |guests| guests.log(&name, &options)).await.map(Json)
}

fn address(text: &str) -> Result<Address, Refusal> {
    text.parse().map(Address).map_err(|error| Refusal::invalid("address", error))
}

async fn attach(
    State(guests): State<App>,
    Path((name, device)): Path<(String, String)>,
    Extension(caller): Extension<Caller>,
    Sent(options): Sent<AttachOptions>,
) -> Result<Json<Value>, Refusal> {
    let request = AttachRequest { address: address(&device)?, options };
    waiting(guests, move |guests| guests.attach(&name, request, &caller)).await.map(Json)
}

async fn detach(
    State(guests): State<App>,
    Path((name, device)): Path<(String, String)>,
    Query(options): Query<DetachOptions>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<Value>, Refusal> {
    let request = DetachRequest { address: address(&device)?, options };
    waiting(guests, move |guests| guests.detach(&name, request, &caller)).await.map(Json)
}

async fn devices(State(guests): State<App>) -> Result<Json<Vec<ListedFunction>>, Refusal> {
    waiting(guests, Guests::devices).await.map(Json)
}

async fn device(
    State(guests): State<App>,
    Path(device): Path<String>,
) -> Result<Json<ListedFunction>, Refusal> {
    let Address(address) = address(&device)?;
    waiting(guests, move |guests| guests.device(address)).await.map(Json)
}

async fn events(
    State(guests): State<App>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Refusal> {
    let events = ReceiverStream::new(guests.events().listen()?).map(|event| {
        let text = serde_json::to_string(&event).unwrap_or_default();
        Ok(Event::default().event(event.event.as_str()).data(text))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}

async fn metrics(State(guests): State<App>) -> Result<Response, Refusal> {
    let text = waiting(guests, |guests| guests.events().metrics.text(guests)).await?;
    Ok(([(CONTENT_TYPE, HeaderValue::from_static(METRICS))], text).into_response())
}

async fn description() -> Json<Value> {
    Json(openapi::document(&operations()))
}
