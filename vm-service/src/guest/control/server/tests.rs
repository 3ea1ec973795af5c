//! A guest that is only its control socket, and clients of every kind.

use std::io::{BufRead as _, BufReader};
use std::sync::mpsc::{Sender, channel};

use serde_json::json;
use vm_passthrough::sim::SimHost;

use super::*;
use crate::api::{EventKind, GuestState};
use crate::guest::control::{CallError, Connection as Client, GuestHome};

const TIMEOUT: Duration = Duration::from_secs(120);

/// A guest whose devices come when they are sent for.
struct Fake {
    outbox: Outbox,
    stopped: Mutex<u32>,
    waiting: Mutex<Vec<Answer>>,
    seen: Mutex<Sender<AttachRequest>>,
}

impl Controlled for Fake {
    fn status(&self) -> GuestStatus {
        GuestStatus {
            name: "web1".into(),
            pid: std::process::id(),
            state: GuestState::Running,
            since: 0,
            vcpus: 1,
            memory: 4 << 20,
            devices: Vec::new(),
            dma_bytes: None,
            peer_to_peer: None,
            console: None,
            how: None,
            confinement: None,
        }
    }

    fn power_button(&self) {}

    fn stop(&self) {
        *self.stopped.lock().expect("a count") += 1;
    }

    fn reset(&self, answer: Answer) {
        answer.send(Ok(()));
    }

    fn attach(&self, request: AttachRequest, answer: Answer) {
        self.waiting.lock().expect("answers").push(answer);
        let _ = self.seen.lock().expect("a channel").send(request);
    }

    fn detach(&self, _: DetachRequest, answer: Answer) {
        answer.send(Err::<(), _>(Refusal::new(RefusalCode::NotFound, "it has no such device")));
    }
}

struct World {
    sim: SimHost,
    home: GuestHome,
    guest: Arc<Fake>,
    server: Option<Server>,
    attaching: std::sync::mpsc::Receiver<AttachRequest>,
}

fn world() -> World {
    let sim = SimHost::new().expect("a simulated host");
    let home = GuestHome::take(&sim.plain_host(), "web1").expect("a home");
    let (seen, attaching) = channel();
    let mut made = None;
    let server = Server::start(home.listen().expect("a socket"), None, |outbox| {
        let (stopped, waiting) = Default::default();
        made.insert(Arc::new(Fake { outbox, stopped, waiting, seen: Mutex::new(seen) })).clone()
    });
    let (server, guest) = (Some(server.expect("a thread")), made.expect("a guest"));
    World { sim, home, guest, server, attaching }
}

impl World {
    fn client(&self) -> Client {
        Client::open(&self.sim.plain_host(), "web1").expect("a connection")
    }

    fn raw(&self) -> UnixStream {
        let stream = UnixStream::connect(self.home.path().join("control")).expect("a connection");
        stream.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        stream
    }
}

/// What a guest sends next; `None` when it has closed the connection.
fn next(stream: &mut BufReader<UnixStream>) -> Option<Value> {
    let mut line = String::new();
    (stream.read_line(&mut line).ok()? > 0).then(|| serde_json::from_str(&line).expect("JSON"))
}

#[test]
fn answers_in_any_order_and_tells_what_happens() {
    let mut world = world();
    let mut client = world.client();
    assert_eq!(client.status().expect("a status"), world.guest.status());
    client.stop().expect("stopped");
    client.reset(TIMEOUT).expect("reset");
    assert_eq!(*world.guest.stopped.lock().expect("a count"), 1);

    let mut stream = BufReader::new(world.raw());
    let text = concat!(
        r#"{"id":1,"request":{"type":"attach","address":"65:00.0"}}"#,
        "\n",
        r#"{"id":2,"request":{"type":"detach","address":"66:00.0"}}"#,
        "\n",
        r#"{"id":3,"request":{"type":"subscribe"}}"#,
        "\n",
    );
    stream.get_mut().write_all(text.as_bytes()).expect("written");
    let refused = json!({"code": "not-found", "message": "it has no such device"});
    assert_eq!(next(&mut stream), Some(json!({"id": 2, "answer": {"error": refused}})));
    assert_eq!(next(&mut stream).map(|answer| answer["id"].clone()), Some(json!(3)));
    let request = world.attaching.recv_timeout(TIMEOUT).expect("a request");
    assert_eq!(request.address.0.to_string(), "0000:65:00.0");
    let address = Some(request.address.0.to_string());
    let event = GuestEvent { address, ..GuestEvent::new("web1", EventKind::DeviceAttached) };
    world.guest.outbox.event(event.clone());
    assert_eq!(next(&mut stream), Some(json!({ "event": event })));
    world.guest.waiting.lock().expect("answers").pop().expect("one").send(Ok(json!("done")));
    assert_eq!(next(&mut stream), Some(json!({"id": 1, "answer": {"ok": "done"}})));

    // What is not answered when the guest ends is said to be so, and the connection closes behind the last word.
    stream
        .get_mut()
        .write_all(b"{\"id\":9,\"request\":{\"type\":\"attach\",\"address\":\"65:00.0\"}}\n")
        .expect("written");
    world.attaching.recv_timeout(TIMEOUT).expect("a request");
    world.guest.waiting.lock().expect("answers").clear();
    world.guest.outbox.event(GuestEvent { event: EventKind::Ended, address: None, ..event });
    world.server = None;
    let last: Vec<_> = std::iter::from_fn(|| next(&mut stream)).collect();
    assert_eq!(last[0]["answer"]["error"]["message"], "the guest ended before that was done");
    assert_eq!(last[1]["event"]["event"], "ended");
    assert_eq!(last.len(), 2);
    assert!(matches!(client.status(), Err(CallError::Ended(_))));
    assert!(matches!(Client::open(&world.sim.plain_host(), "web1"), Err(CallError::NotRunning(_))));
}

#[test]
fn what_is_no_request_is_refused_in_words() {
    let world = world();
    let check = |bytes: &[u8], expect: &[&str]| {
        let mut stream = BufReader::new(world.raw());
        stream.get_mut().write_all(bytes).expect("written");
        let _ = stream.get_mut().shutdown(std::net::Shutdown::Write);
        let got: Vec<_> = std::iter::from_fn(|| next(&mut stream)).collect();
        assert_eq!(got.len(), expect.len(), "{got:?}");
        for (got, expect) in got.iter().zip(expect) {
            assert!(
                got["answer"]["error"]["message"].as_str().is_some_and(|text| text.contains(expect)),
                "{got}"
            );
        }
    };
    check(b"", &[]);
    check(b"hello\n", &["expected value"]);
    check(
        b"{}\n{\"id\":1,\"request\":{\"type\":\"dance\"}}\n",
        &["missing field `id`", "unknown variant `dance`"],
    );
    check(&[b'x'; 70 << 10], &["longer than 64 KiB"]);
    check(b"{\"id\":1,\"request\":{\"type\":\"hello\",\"versions\":[7]}}\n", &["speaks version 1"]);
}

#[test]
fn clients_that_are_mute_slow_or_many_hold_nobody_up() {
    let world = world();
    // Half a line each, and none reads: more than there may be.
    let crowd: Vec<_> = (0..40)
        .map(|_| {
            let mut stream = world.raw();
            let _ = stream.write_all(b"{\"id\":1,");
            stream
        })
        .collect();
    assert_eq!(world.client().status().expect("a status").name, "web1");
    // One that asks and never reads: the guest drops it when it leaves too much.
    let mut deaf = world.raw();
    let begun = Instant::now();
    while deaf.write_all(b"{\"id\":1,\"request\":{\"type\":\"status\"}}\n").is_ok() {
        assert!(begun.elapsed() < TIMEOUT, "it is never dropped");
    }
    assert_eq!(world.client().status().expect("a status").name, "web1");
    drop(crowd);
    // No more requests than may be in flight, by however many clients.
    let mut stream = BufReader::new(world.raw());
    for id in 0..=MAX_IN_FLIGHT {
        let line = format!("{{\"id\":{id},\"request\":{{\"type\":\"attach\",\"address\":\"65:00.0\"}}}}\n");
        stream.get_mut().write_all(line.as_bytes()).expect("written");
    }
    let answer = next(&mut stream).expect("an answer");
    assert_eq!(
        (&answer["id"], &answer["answer"]["error"]["code"]),
        (&json!(MAX_IN_FLIGHT), &json!("conflict"))
    );
    // Answers to one who has gone are nobody's.
    drop(stream);
    world.guest.waiting.lock().expect("answers").drain(..).for_each(|answer| answer.send(Ok(())));
    assert_eq!(world.client().status().expect("a status").name, "web1");
}
