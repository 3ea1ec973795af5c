//! The API over a real socket, with guests that are threads of this process and take devices of a simulated host.

mod guest;
mod random;

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vm_passthrough::sim::{SimDrivers, SimFunction, SimHost};
use vm_passthrough::{Host, PciAddress};

use super::*;
use guest::{DEAF, NEVER, Threads};
use guests::MAX_WAITING;

use crate::api::Problem;
use crate::deadlines;

const TIMEOUT: Duration = Duration::from_secs(120);
/// How often the daemon looks for guests here.
const INTERVAL: Duration = Duration::from_millis(2);

/// A host with three NVMe disks and one that no guest can have, and its daemon.
struct World {
    sim: SimHost,
    host: Host,
    threads: Threads,
    daemon: Option<(tokio::sync::watch::Sender<bool>, JoinHandle<()>)>,
}

/// The disks' addresses.
fn disk(number: u8) -> PciAddress {
    PciAddress::new(0, number + 1, 0, 0).expect("an address")
}

const DISKS: u8 = 3;

impl World {
    fn new() -> Self {
        // Where there is one, a file system in memory: the ledger waits for what it writes to be safe.
        let memory = std::path::Path::new("/dev/shm");
        let sim = if memory.is_dir() { SimHost::new_in(memory) } else { SimHost::new() };
        let sim = sim.expect("a simulated host");
        for driver in ["nvme", "pcieport"] {
            sim.add_driver(driver).expect("a driver");
        }
        for number in 0..DISKS {
            let port = PciAddress::new(0, 0, number + 1, 0).expect("an address");
            let port_function = SimFunction::root_port(port).group(number.into()).driver("pcieport");
            sim.add(&port_function).expect("a port");
            let function =
                SimFunction::nvme(disk(number)).below(port).group(10 + u32::from(number)).driver("nvme");
            sim.add(&function).expect("a disk");
        }
        let blocked = SimFunction::nvme(disk(DISKS)).no_group().driver("nvme");
        sim.add(&blocked).expect("a disk without an IOMMU");
        std::fs::write(sim.path("kernel"), "a kernel").expect("written");
        let (host, threads) = (SimDrivers::new(&sim).host(), Threads::default());
        let mut world = Self { sim, host, threads, daemon: None };
        world.serve();
        world
    }

    /// Starts the daemon.
    fn serve(&mut self) {
        let listening = socket::listen(&self.host, None).expect("a socket");
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let mut guests = Guests::new(self.host.clone(), Box::new(self.threads.clone()), Events::default());
        guests.start_within = |guest| if guest.name == NEVER { Duration::from_secs(1) } else { TIMEOUT };
        let guests = Arc::new(guests);
        let serve = move || serve_on(listening, guests, INTERVAL, stopped).expect("served");
        self.daemon = Some((stop, std::thread::spawn(serve)));
    }

    /// Ends the daemon; guests go on.
    fn end(&mut self) {
        if let Some((stop, thread)) = self.daemon.take() {
            stop.send(true).expect("it serves");
            thread.join().expect("no panic");
        }
    }

    /// A guest's file as JSON.
    fn file(&self, devices: &[PciAddress]) -> Value {
        let devices: Vec<_> = devices.iter().map(|device| json!({ "address": device.to_string() })).collect();
        json!({ "memory": "64M", "boot": { "kernel": self.sim.path("kernel") }, "devices": devices })
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.host.state.join("daemon.sock")).expect("a connection");
        stream.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        stream
    }

    /// Sends a request, and answers with the status, the head and the body.
    fn raw(&self, request: &str) -> (u16, String, String) {
        let mut stream = self.connect();
        stream.write_all(request.as_bytes()).expect("written");
        let mut text = Vec::new();
        stream.read_to_end(&mut text).expect("an answer");
        let text = String::from_utf8(text).expect("UTF-8");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).expect("a status").parse().expect("a number");
        (status, head.to_ascii_lowercase(), body.to_owned())
    }

    fn call(&self, method: &str, path: &str, body: Option<&Value>) -> (u16, Value) {
        let body = body.map_or_else(String::new, Value::to_string);
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
        );
        let (status, _, body) = self.raw(&(head + &body));
        (status, serde_json::from_str(&body).unwrap_or(Value::String(body)))
    }

    /// The state of every device as its driver shows it.
    fn drivers(&self) -> Vec<Option<String>> {
        (0..DISKS).map(|number| self.sim.driver_of(disk(number))).collect()
    }

    #[track_caller]
    fn wait_until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let deadline = Instant::now() + TIMEOUT;
        while !done() {
            assert!(Instant::now() < deadline, "{what} does not come");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.end();
        self.threads.end_all();
    }
}

#[test]
fn a_guest_that_does_not_start_in_time_is_ended_and_leaves_nothing() {
    let world = World::new();
    // The second time the name is free.
    for _ in 0..2 {
        let (status, problem) = world.call("PUT", "/v1/guests/never", Some(&world.file(&[disk(0)])));
        assert_eq!((status, &problem["code"]), (504, &json!("timeout")), "{problem}");
        let says = "did not run with its devices within 1 s, and was ended; see `vm-service logs never`";
        assert!(problem["detail"].as_str().is_some_and(|detail| detail.contains(says)), "{problem}");
        assert_eq!(world.call("GET", "/v1/guests", None).1, json!([]));
        assert!(world.drivers().iter().all(|driver| driver.as_deref() == Some("nvme")));
    }
}

#[test]
fn what_is_wrong_gets_a_problem_document_that_names_the_field() {
    let world = World::new();
    let check = |request: &str, body: Value, expect: &str, says: &str| {
        let text = if body.is_null() { String::new() } else { body.to_string() };
        let length = text.len();
        let head =
            format!("{request} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
        let (got, head, text) = world.raw(&(head + &text));
        assert!(head.contains("content-type: application/problem+json"), "{request}: {head}");
        let problem: Problem = serde_json::from_str(&text).expect("a problem document");
        let code = serde_json::to_value(problem.code).expect("a code");
        let code = code.as_str().expect("a text");
        let field = problem.field.map(|field| format!(" {field}")).unwrap_or_default();
        assert_eq!(format!("{got} {code}{field}"), expect, "{request}: {text}");
        assert_eq!(problem.status, got);
        assert!(problem.detail.contains(says), "{request}: {text}");
        assert_eq!(problem.kind, format!("urn:vm-service:{code}"));
    };
    let none = || Value::Null;
    let file = |change: fn(&mut Value)| {
        let mut file = world.file(&[]);
        change(&mut file);
        file
    };
    check("GET /v1/guest", none(), "404 not-found", "the API has no /v1/guest");
    check("PATCH /v1/guests", none(), "405 invalid", "/v1/guests takes no PATCH");
    check("GET /v1/guests/web1", none(), "404 not-found", "no guest named web1");
    check("GET /v1/guests/..%2f..", none(), "404 not-found", "no guest named");
    check("GET /v1/guests/%ff", none(), "400 invalid", "");
    check("GET /v1/guests/web1/log", none(), "404 not-found", "no log of a guest web1");
    check("GET /v1/guests/..%2f../log", none(), "400 invalid name", "1 to 64 letters");
    check("POST /v1/guests/web1/stop?deadline_ms=x", none(), "400 invalid deadline_ms", "invalid digit");
    for request in ["POST /v1/guests/web1/stop", "POST /v1/guests/web1/reset", "GET /v1/guests"] {
        check(request, json!({ "now": true }), "400 invalid", "takes no body; what it takes is in the query");
    }
    let gone = "DELETE /v1/guests/web1/devices/65:00.0";
    check(gone, json!({ "how": "surprise" }), "400 invalid", "takes no body");
    check("POST /v1/guests/web1/stop?soon=1", none(), "400 invalid soon", "unknown field `soon`");
    check("POST /v1/guests/web1/reset", none(), "404 not-found", "no guest named web1");
    for path in [
        "POST /v1/guests/web1/reset",
        "GET /v1/guests/web1",
        "GET /v1/guests",
        "GET /v1/devices",
        "GET /v1/devices/65:00.0",
        "PUT /v1/guests/web1/devices/65:00.0",
        "GET /v1/events",
        "GET /metrics",
        "GET /openapi.json",
    ] {
        check(&format!("{path}?foo=bar"), none(), "400 invalid foo", "unknown field `foo`");
    }
    check("PUT /v1/guests/web1/devices/x", none(), "400 invalid address", "not a PCI address");
    check(
        "PUT /v1/guests/web1/devices/65:00.0",
        json!({"with_group": 1}),
        "400 invalid with_group",
        "a boolean",
    );
    check("PUT /v1/guests/web1/devices/65:00.0", json!({"with": ["y"]}), "400 invalid with[0]", "`y` is not");
    check("PUT /v1/guests/web1/devices/65:00.0", none(), "404 not-found", "no guest named web1");
    check("DELETE /v1/guests/web1/devices/65:00.0?hwo=surprise", none(), "400 invalid hwo", "unknown field");
    check(
        "PUT /v1/guests/web1/devices/65:00.0",
        json!({"wiht_group": true}),
        "400 invalid wiht_group",
        "unknown field",
    );
    check("DELETE /v1/guests/web1/devices/65:00.0?how=slowly", none(), "400 invalid how", "unknown variant");
    check("PUT /v1/guests/web1", json!([]), "400 invalid", "expected a map");
    check("PUT /v1/guests/web1", none(), "400 invalid memory", "`boot` is missing");
    check("PUT /v1/guests/we%20b1", file(|_| ()), "400 invalid name", "1 to 64 letters");
    check("PUT /v1/guests/web1?accept=all", file(|_| ()), "400 invalid accept[0]", "unknown variant");
    check(
        "PUT /v1/guests/web1",
        file(|file| file["name"] = "web2".into()),
        "400 invalid name",
        "another than",
    );
    check("PUT /v1/guests/web1", file(|file| file["vcpus"] = 300.into()), "400 invalid vcpus", "1 to 255");
    check(
        "PUT /v1/guests/web1",
        file(|file| file["memori"] = 1.into()),
        "400 invalid memori",
        "did you mean `memory`",
    );
    check("PUT /v1/guests/web1", file(|file| file["vcpus"] = Value::Null), "400 invalid vcpus", "null");
    check(
        "PUT /v1/guests/web1",
        file(|file| file["boot"]["kernel"] = "/nowhere/kernel".into()),
        "400 invalid boot.kernel",
        "No such file",
    );
    check(
        "PUT /v1/guests/web1",
        file(|file| file["boot"]["initrd"] = "../initrd".into()),
        "400 invalid boot.initrd",
        "",
    );
    check("PUT /v1/guests/web1", world.file(&[disk(9)]), "500 failed", "");
    let blocked = world.file(&[disk(0), disk(DISKS)]);
    check("PUT /v1/guests/web1", blocked.clone(), "409 blocked", "no-iommu");
    let (_, problem) = world.call("PUT", "/v1/guests/web1", Some(&blocked));
    let problem: Problem = serde_json::from_value(problem).expect("a problem document");
    let codes: Vec<_> =
        problem.blockers.iter().map(|found| found.blockers.first().map(|one| one.code.as_str())).collect();
    assert_eq!(codes, [None, Some("no-iommu")]);
    assert_eq!(world.call("GET", "/v1/guests", None), (200, json!([])));
    assert!(
        !world.host.state.join("ledger").exists()
            || world.drivers().iter().flatten().all(|driver| driver == "nvme")
    );
}

#[test]
fn a_key_that_stands_twice_is_refused() {
    let world = World::new();
    for (body, field) in [
        (r#"{"memory":"16M","memory":"32M","boot":{"kernel":"/k"}}"#, "memory"),
        (r#"{"memory":"16M","boot":{"kernel":"/k","kernel":"/l"}}"#, "kernel"),
    ] {
        let length = body.len();
        let head = format!(
            "PUT /v1/guests/web1 HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
        );
        let (status, _, text) = world.raw(&(head + body));
        assert!(status == 400 && text.contains(&format!("duplicate key: `{field}`")), "{status}: {text}");
    }
}

#[test]
fn who_closes_its_half_after_the_request_is_answered() {
    let world = World::new();
    let mut stream = world.connect();
    stream.write_all(b"GET /v1/guests HTTP/1.1\r\nhost: x\r\n\r\n").expect("written");
    stream.shutdown(std::net::Shutdown::Write).expect("closed");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    assert!(text.starts_with("HTTP/1.1 200") && text.ends_with("[]"), "{text}");
}

#[test]
fn what_a_guest_says_of_others_is_not_passed_on() {
    let world = World::new();
    for (guest, says, console) in [("liar", "web1", "/dev/pts/0"), ("econ", "econ", "/etc/hostname")] {
        let home = world.host.state.join("guests").join(guest);
        std::fs::create_dir_all(&home).expect("a directory");
        let listener = std::os::unix::net::UnixListener::bind(home.join("control")).expect("a socket");
        let status = json!({"name": says, "pid": 1, "state": "running", "since": 0, "vcpus": 1, "memory": 0, "devices": [], "console": console});
        // Ends with the test.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (mut writer, status) = (stream.try_clone().expect("a clone"), status.clone());
                std::thread::spawn(move || {
                    let lines = std::io::BufRead::lines(std::io::BufReader::new(stream));
                    for (id, _) in lines.map_while(Result::ok).enumerate() {
                        let answer = json!({"id": id + 1, "answer": {"ok": status}});
                        let _ = writeln!(writer, "{answer}");
                    }
                });
            }
        });
    }
    let (status, refused) = world.call("GET", "/v1/guests/liar", None);
    assert!(
        status == 500 && refused["detail"].as_str().is_some_and(|text| text.contains("another guest")),
        "{refused}"
    );
    let (status, guest) = world.call("GET", "/v1/guests/econ", None);
    assert_eq!((status, &guest["console"]), (200, &Value::Null), "{guest}");
}

#[test]
fn a_guest_that_answers_late_is_subscribed_to() {
    let world = World::new();
    let home = world.host.state.join("guests").join("late");
    std::fs::create_dir_all(&home).expect("a directory");
    let listener = std::os::unix::net::UnixListener::bind(home.join("control")).expect("a socket");
    let (subscribed, subscription) = std::sync::mpsc::channel();
    // Ends with the test.
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (mut writer, subscribed) = (stream.try_clone().expect("a clone"), subscribed.clone());
            std::thread::spawn(move || {
                let lines = std::io::BufRead::lines(std::io::BufReader::new(stream));
                for (id, line) in lines.map_while(Result::ok).enumerate() {
                    match id {
                        0 => std::thread::sleep(deadlines::CONTROL_ANSWER + Duration::from_millis(500)),
                        _ => drop(subscribed.send(line)),
                    }
                    let _ = writeln!(writer, "{}", json!({"id": id + 1, "answer": {"ok": null}}));
                }
            });
        }
    });
    let request = subscription.recv_timeout(TIMEOUT).expect("a request after the late answer");
    assert!(request.contains("subscribe"), "{request}");
}

#[test]
fn listeners_leave_connections_to_others() {
    let world = World::new();
    let mut listeners = Vec::new();
    for _ in 0..300 {
        let mut stream = world.connect();
        stream
            .write_all(b"GET /v1/events HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            .expect("written");
        listeners.push(stream);
    }
    assert_eq!(world.call("GET", "/v1/guests", None), (200, json!([])));
    let (status, refused) = world.call("GET", "/v1/events", None);
    assert_eq!((status, &refused["code"]), (503, &json!("busy")), "{refused}");
    drop(listeners);
}

#[test]
fn stops_that_wait_leave_the_guest_to_others() {
    let world = World::new();
    let (status, refused) = world.call("POST", "/v1/guests/deaf/stop?deadline_ms=18446744073709551615", None);
    assert_eq!((status, &refused["field"]), (400, &json!("deadline_ms")), "{refused}");
    let (status, guest) = world.call("PUT", "/v1/guests/deaf", Some(&world.file(&[])));
    assert_eq!((status, &guest["name"]), (201, &json!(DEAF)), "{guest}");
    let ask = || {
        let mut stream = world.connect();
        let head = "POST /v1/guests/deaf/stop?deadline_ms=86400000 HTTP/1.1\r\nhost: x\r\n\r\n";
        stream.write_all(head.as_bytes()).expect("written");
        stream
    };
    // As many wait as may; each of the others is answered.
    let mut clients: Vec<_> = (0..MAX_WAITING + 8).map(|_| ask()).collect();
    let mut answered = Vec::new();
    world.wait_until("the answers to those that may not wait", || {
        clients.retain_mut(|client| {
            client.set_read_timeout(Some(Duration::from_millis(20))).expect("a timeout");
            let mut head = [0; 12];
            let is_answered = client.read_exact(&mut head).is_ok();
            answered.extend(is_answered.then_some(head));
            !is_answered
        });
        answered.len() == 8
    });
    assert!(answered.iter().all(|head| head == b"HTTP/1.1 503"), "{answered:?}");
    let (_, guests) = world.call("GET", "/v1/guests", None);
    assert_eq!((&guests[0]["name"], &guests[0]["state"]), (&json!(DEAF), &json!("running")), "{guests}");
    assert_eq!(world.call("GET", "/v1/guests/deaf", None).0, 200);
    let (status, stopped) = world.call("POST", "/v1/guests/deaf/stop?now=true", None);
    assert_eq!((status, &stopped["how"]), (200, &json!("cut")), "{stopped}");
}

#[test]
fn requests_that_wait_end_when_their_clients_disconnect() {
    let world = World::new();
    let (status, guest) = world.call("PUT", "/v1/guests/deaf", Some(&world.file(&[])));
    assert_eq!((status, &guest["name"]), (201, &json!(DEAF)), "{guest}");
    let stop = |deadline: u32| {
        let mut stream = world.connect();
        let head = format!(
            "POST /v1/guests/deaf/stop?deadline_ms={deadline} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).expect("written");
        stream
    };
    let reset = || world.call("POST", "/v1/guests/deaf/reset", None).0;
    let clients: Vec<_> = (0..MAX_WAITING).map(|_| stop(86_400_000)).collect();
    world.wait_until("as many requests as may wait", || reset() == 503);
    drop(clients);
    world.wait_until("room for another request", || reset() == 200);
    // The guest that ignored its power button runs on.
    assert_eq!(world.call("GET", "/v1/guests/deaf", None).1["state"], "running");
    // A client that has closed its half for writing still waits for its answer, longer than it takes to see a disconnect.
    let mut half = stop(2500);
    half.shutdown(std::net::Shutdown::Write).expect("shut down");
    let mut answer = String::new();
    half.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"how\":\"cut\""), "{answer}");
}

#[test]
fn a_socket_on_which_a_daemon_listens_is_left_to_it() {
    let world = World::new();
    let socket = world.host.state.join("daemon.sock");
    let other = SimHost::new().expect("a simulated host").plain_host();
    let error = socket::listen(&other, Some(&socket)).expect_err("it is taken").to_string();
    assert!(error.contains("another daemon listens"), "{error}");
    assert_eq!(world.call("GET", "/v1/guests", None).0, 200);
    // What a killed daemon left is replaced, and nobody removes the socket of another.
    let path = world.sim.path("left.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).expect("a socket"));
    let listening = socket::listen(&other, Some(&path)).expect("a socket");
    std::fs::remove_file(&path).expect("removed");
    std::fs::write(&path, "").expect("another file");
    drop(listening);
    assert!(path.exists());
}

#[test]
fn a_guest_is_started_changed_and_stopped() {
    let world = World::new();
    let (status, guest) = world.call("PUT", "/v1/guests/web1", Some(&world.file(&[disk(0)])));
    assert_eq!(
        (status, &guest["state"], &guest["memory"]),
        (201, &json!("running"), &json!(64 << 20)),
        "{guest}"
    );
    let (status, refused) = world.call("PUT", "/v1/guests/web1", Some(&world.file(&[])));
    assert_eq!((status, &refused["code"]), (409, &json!("conflict")), "{refused}");
    let on = |drivers: [&str; 3]| assert_eq!(world.drivers(), drivers.map(|driver| Some(driver.to_owned())));
    on(["vfio-pci", "nvme", "nvme"]);
    let (status, attached) = world.call("PUT", "/v1/guests/web1/devices/02:00.0", None);
    assert_eq!((status, &attached[0]["address"]), (200, &json!("0000:02:00.0")), "{attached}");
    on(["vfio-pci", "vfio-pci", "nvme"]);
    // The state of devices comes when it does.
    let without_health = |mut guest: Value| {
        let devices = guest["devices"].as_array_mut().expect("devices");
        devices.iter_mut().for_each(|device| device["health"] = Value::Null);
        guest
    };
    let guest = without_health(world.call("GET", "/v1/guests/web1", None).1);
    let addresses: Vec<_> =
        guest["devices"].as_array().expect("devices").iter().map(|device| &device["address"]).collect();
    assert_eq!(addresses, ["0000:01:00.0", "0000:02:00.0"]);
    let mut listed = world.call("GET", "/v1/guests", None).1;
    assert_eq!((listed.as_array().map(Vec::len), without_health(listed[0].take())), (Some(1), guest));
    world.wait_until("the state of its device", || {
        world.call("GET", "/v1/guests/web1", None).1["devices"][0]["health"]["link"]["width"] == 4
    });
    let metrics = world.call("GET", "/metrics", None).1.to_string();
    assert!(
        metrics.contains("vm_service_device_link_lanes{guest=\\\"web1\\\",address=\\\"0000:01:00.0\\\"} 4"),
        "{metrics}"
    );
    let device = world.call("GET", "/v1/devices/0000:01:00.0", None).1;
    assert_eq!(device["health"]["power_state"], "d0", "{device}");
    let (status, detached) = world.call("DELETE", "/v1/guests/web1/devices/01:00.0?how=surprise", None);
    assert_eq!((status, &detached["how"]), (200, &json!("surprise")), "{detached}");
    on(["nvme", "vfio-pci", "nvme"]);
    let (status, refused) = world.call("DELETE", "/v1/guests/web1/devices/01:00.0", None);
    assert_eq!((status, &refused["code"]), (404, &json!("not-found")), "{refused}");
    let (status, answer) = world.call("POST", "/v1/guests/web1/stop", None);
    assert_eq!((status, answer), (200, json!({"guest": "web1", "how": "orderly"})));
    on(["nvme", "nvme", "nvme"]);
    let (status, log) = world.call("GET", "/v1/guests/web1/log", None);
    assert_eq!((status, &log["log"]), (200, &json!("web1 runs\n")), "a log is there behind the end");
    for beyond in [100, i64::MAX as u64 + 1, u64::MAX] {
        let (status, log) = world.call("GET", &format!("/v1/guests/web1/log?from={beyond}"), None);
        assert_eq!((status, &log["log"], &log["next"]), (200, &json!(""), &json!(beyond)), "{log}");
    }
    let previous = || world.call("GET", "/v1/guests/web1/log?previous=true", None);
    assert_eq!(previous().0, 404);
    assert_eq!(world.call("PUT", "/v1/guests/web1", Some(&world.file(&[]))).0, 201);
    assert_eq!(previous().1["log"], json!("web1 runs\n"), "and behind the next start");
}

#[test]
fn several_devices_of_one_command_come_and_go_one_after_the_other() {
    let world = World::new();
    let at = |text: &str| text.parse().expect("an address");
    let nvme = |text| SimFunction::nvme(at(text)).driver("nvme");
    // Two functions of one device, and two virtual functions beside their physical one.
    for function in [
        nvme("06:00.0").group(50),
        nvme("06:00.1").group(50),
        nvme("07:00.0").group(51).sriov(2),
        nvme("07:00.1").group(52).virtual_of(at("07:00.0")),
        nvme("07:00.2").group(53).virtual_of(at("07:00.0")),
    ] {
        world.sim.add(&function).expect("a function");
    }
    let (status, guest) = world.call("PUT", "/v1/guests/web1", Some(&world.file(&[])));
    assert_eq!(status, 201, "{guest}");
    let check = |command: &str, exit: u8, has: &[&str], says: &str| {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let words = format!("vm-service {command} --guest web1");
        let words = words.split(' ').map(Into::into);
        let code =
            crate::cli::run(words, Some(world.host.clone()), "/nonexistent".as_ref(), &mut out, &mut err);
        let [out, err] = [out, err].map(|bytes| String::from_utf8(bytes).expect("UTF-8"));
        assert_eq!(code, exit, "{command}: {out} {err}");
        assert!(err.contains(says) && err.is_empty() == says.is_empty(), "{command}: {err}");
        let (_, guest) = world.call("GET", "/v1/guests/web1", None);
        let devices = guest["devices"].as_array().expect("devices").iter();
        let devices: Vec<_> = devices.map(|device| device["address"].as_str().expect("an address")).collect();
        assert_eq!(devices, has, "{command}");
    };
    // The guest here notes the function that it is asked for, and not those that come with it.
    check("attach 06:00.1 06:00.0 06:00.1", 0, &["0000:06:00.1"], "");
    check("detach 06:00.1 06:00.0", 0, &[], "");
    check(
        "attach 07:00.1 09:00.0 07:00.2",
        1,
        &["0000:07:00.1", "0000:07:00.2"],
        "error: 0000:09:00.0 was not attached: ",
    );
    check("detach 07:00.2 07:00.1 --surprise", 0, &[], "");
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let words = ["vm-service", "--json", "attach", "04:00.0", "06:00.0", "09:00.0", "--guest", "web1"];
    let code = crate::cli::run(
        words.map(Into::into),
        Some(world.host.clone()),
        "/nonexistent".as_ref(),
        &mut out,
        &mut err,
    );
    let document: Value = serde_json::from_slice(&out).expect("one document");
    let (devices, blocked) = (&document["devices"], &document["blocked"]);
    assert_eq!((code, &document["command"]), (3, &json!("attach")), "{document}");
    assert_eq!((&devices[0]["address"], &devices[1]), (&json!("0000:06:00.0"), &Value::Null), "{document}");
    assert_eq!((&blocked[0]["address"], &blocked[1]), (&json!("0000:04:00.0"), &Value::Null), "{document}");
    assert_eq!(blocked[0]["blockers"][0]["code"], "no-iommu", "{document}");
    let (status, one) = world.call("GET", "/v1/devices/07:00.1", None);
    assert_eq!((status, &one["sriov"]["physical"]), (200, &json!("0000:07:00.0")), "{one}");
    let (status, refused) = world.call("GET", "/v1/devices/09:00.0", None);
    assert_eq!((status, &refused["code"]), (404, &json!("not-found")), "{refused}");
}

#[test]
fn a_daemon_that_starts_finds_guests_and_releases_what_dead_ones_left() {
    let mut world = World::new();
    for (guest, disks) in [("web1", [disk(0)]), ("web2", [disk(1)])] {
        let (status, answer) = world.call("PUT", &format!("/v1/guests/{guest}"), Some(&world.file(&disks)));
        assert_eq!(status, 201, "{answer}");
    }
    let operator = ["vm-service", "claim", "03:00.0"].map(Into::into);
    assert_eq!(
        crate::cli::run(
            operator,
            Some(world.host.clone()),
            "/nonexistent".as_ref(),
            &mut Vec::new(),
            &mut Vec::new()
        ),
        0
    );
    world.end();
    world.threads.kill(&world.sim, &world.host, "web2");
    assert_eq!(world.drivers(), [(); 3].map(|()| Some("vfio-pci".to_owned())));
    world.serve();
    let names = |world: &World| {
        let (_, guests) = world.call("GET", "/v1/guests", None);
        guests.as_array().expect("guests").iter().map(|guest| guest["name"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(&world), ["web1"]);
    world.threads.kill(&world.sim, &world.host, "web1");
    let back = |driver: &str| Some(driver.to_owned());
    world.wait_until("the dead guests' disks", || world.drivers()[..2] == [back("nvme"), back("nvme")]);
    assert_eq!(
        world.drivers(),
        [back("nvme"), back("nvme"), back("vfio-pci")],
        "what the operator claimed stays"
    );
    assert_eq!(names(&world), Vec::<Value>::new());
    let metrics = || world.call("GET", "/metrics", None).1.as_str().expect("text").to_owned();
    // They are counted once they are released.
    world.wait_until("the count of them", || metrics().contains("vm_service_recovered_functions_total 2"));
    let metrics = metrics();
    for line in
        ["vm_service_events_total{kind=\"ended\"} 1", "vm_service_events_total{kind=\"gone\"} 1", "# EOF"]
    {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
}

#[test]
fn a_record_that_somebody_has_locked_for_a_moment_is_released_all_the_same() {
    let world = World::new();
    let (status, answer) = world.call("PUT", "/v1/guests/web1", Some(&world.file(&[disk(0)])));
    assert_eq!(status, 201, "{answer}");
    // As a child of another process does, until it runs its own program.
    let held = world.threads.kill_and(&world.sim, &world.host, "web1", || {
        let record = world.host.state.join(format!("ledger/{}.claim", disk(0)));
        let record = std::fs::File::open(record).expect("a record");
        record.lock().expect("locked");
        record
    });
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(world.drivers()[0].as_deref(), Some("vfio-pci"), "it counts as held");
    drop(held);
    world.wait_until("the disk", || world.drivers()[0].as_deref() == Some("nvme"));
}

#[test]
fn what_happens_to_short_lived_guests_is_told_once_and_in_order() {
    const GUESTS: usize = 10;
    let world = World::new();
    let mut stream = world.connect();
    stream.write_all(b"GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n").expect("written");
    let mut lines =
        std::io::BufRead::lines(std::io::BufReader::new(stream)).map(|line| line.expect("events"));
    assert!(lines.any(|line| line.contains("text/event-stream")));
    for _ in 0..GUESTS {
        assert_eq!(world.call("PUT", "/v1/guests/web1", Some(&world.file(&[]))).0, 201);
        let (_, stopped) = world.call("POST", "/v1/guests/web1/stop?now=true", None);
        assert_eq!(stopped["how"], "cut");
    }
    // A line comes every 15 s, whether anything happens or not.
    let until = Instant::now() + TIMEOUT;
    let lines = lines.take_while(|_| Instant::now() < until);
    let events = lines.filter_map(|line| line.strip_prefix("event: ").map(str::to_owned));
    let told: Vec<_> = events.take(4 * GUESTS).collect();
    assert_eq!(told, ["found", "started", "ended", "gone"].repeat(GUESTS));
}

#[test]
fn events_come_as_they_happen() {
    let world = World::new();
    let mut stream = world.connect();
    stream.write_all(b"GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n").expect("written");
    let mut text = String::new();
    let until = Instant::now() + TIMEOUT;
    let mut wait_for = |what: &str| {
        let mut bytes = [0; 1024];
        while !text.contains(what) {
            assert!(Instant::now() < until, "{what} does not come: {text}");
            let read = stream.read(&mut bytes).expect("events");
            assert!(read > 0, "the stream ended: {text}");
            text.push_str(&String::from_utf8_lossy(&bytes[..read]));
        }
    };
    wait_for("text/event-stream");
    world.call("PUT", "/v1/guests/web1", Some(&world.file(&[])));
    wait_for("event: found\ndata: {\"guest\":\"web1\",\"event\":\"found\"");
    world.call("PUT", "/v1/guests/web1/devices/02:00.0", None);
    wait_for(
        "event: device-attached\ndata: {\"guest\":\"web1\",\"event\":\"device-attached\",\"address\":\"0000:02:00.0\"",
    );
    world.call("POST", "/v1/guests/web1/stop", None);
    wait_for("event: gone\ndata: {\"guest\":\"web1\"");
    world.call("PUT", "/v1/guests/web2", Some(&world.file(&[])));
    world.threads.kill(&world.sim, &world.host, "web2");
    wait_for("\"text\":\"its process was killed, or died\",\"how\":\"killed\",\"time\":\"2");
    wait_for("event: gone\ndata: {\"guest\":\"web2\"");
}

#[test]
fn the_document_names_every_event_and_every_metric() {
    let world = World::new();
    assert_eq!(world.call("PUT", "/v1/guests/web1", Some(&world.file(&[disk(0)]))).0, 201);
    world.wait_until("its events", || world.call("GET", "/metrics", None).1.to_string().contains("started"));
    let metrics = world.call("GET", "/metrics", None).1;
    let metrics = metrics.as_str().expect("text").lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let metrics = metrics.map(|line| match line.split_once(' ') {
        Some((name, "counter")) => format!("{name}_total"),
        Some((name, _)) => name.to_owned(),
        None => panic!("{line}"),
    });
    let description = description();
    let events =
        description["components"]["schemas"]["EventKind"]["oneOf"].as_array().expect("events").clone();
    let events = events.iter().map(|event| event["const"].as_str().expect("a name").to_owned());
    let mut named = 0;
    for name in metrics.chain(events.filter(|name| name != "other")) {
        let row = format!("| `{name}` |");
        assert!(include_str!("../../../docs/daemon.md").contains(&row), "docs/daemon.md misses a row {row}");
        named += 1;
    }
    assert!(named > 15, "only {named} are named");
}

#[test]
fn the_description_and_the_document_have_the_same_keys_of_guest_files() {
    fn keys(schema: &Value, of: &str, all: &mut Vec<String>) {
        for (name, schema) in schema["properties"].as_object().expect("properties") {
            let key = format!("{of}{name}");
            match (&schema["properties"], &schema["items"]) {
                (Value::Null, items) if items["properties"].is_null() => all.push(key),
                (Value::Null, items) => keys(items, &format!("{key}[]."), all),
                _ => keys(schema, &format!("{key}."), all),
            }
        }
    }
    let description = description();
    let put = &description["paths"]["/v1/guests/{name}"]["put"]["requestBody"];
    let mut described = Vec::new();
    keys(&put["content"]["application/json"]["schema"], "", &mut described);
    let rows =
        include_str!("../../../docs/guest-toml.md").lines().filter_map(|line| line.strip_prefix("| `"));
    let mut documented: Vec<_> = rows.filter_map(|row| Some(row.split_once('`')?.0.to_owned())).collect();
    described.sort();
    documented.sort();
    assert_eq!(described, documented);
}

#[test]
fn the_description_is_that_of_the_code_and_is_checked_in() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/openapi.json");
    let description = serde_json::to_string_pretty(&description()).expect("JSON") + "\n";
    if std::env::var_os("UPDATE_OPENAPI").is_some() {
        std::fs::write(&path, &description).expect("written");
    }
    let checked_in = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(
        checked_in,
        description,
        "{} is out of date: run `UPDATE_OPENAPI=1 cargo test -p vm-service --lib daemon`",
        path.display()
    );
    let world = World::new();
    assert_eq!(
        world.call("GET", "/openapi.json", None),
        (200, serde_json::from_str(&checked_in).expect("JSON"))
    );
}

#[test]
fn one_daemon_serves_and_takes_the_place_of_one_that_was_killed() {
    let mut world = World::new();
    let refused = socket::listen(&world.host, None).expect_err("one serves");
    assert!(refused.to_string().contains("another daemon serves"), "{refused}");
    world.end();
    let path = world.host.state.join("daemon.sock");
    assert!(!path.exists(), "an orderly end removes the socket");
    // One that was killed leaves its own.
    drop(std::os::unix::net::UnixListener::bind(&path).expect("a socket"));
    world.serve();
    assert_eq!(world.call("GET", "/v1/guests", None).0, 200);
    world.end();
    std::fs::write(&path, "precious").expect("written");
    let refused = socket::listen(&world.host, None).expect_err("a file is there");
    assert!(refused.to_string().contains("a regular file is there"), "{refused}");
}
