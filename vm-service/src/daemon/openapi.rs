//! The API's description, by OpenAPI 3.1, whose schemas are JSON Schema: they come from the types themselves.

use axum::routing::MethodRouter;
use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value, json};

use crate::api::Problem;
use crate::config::GUEST_WAIVERS;
use crate::os::sandbox::Measure;

type SchemaOf = fn(&mut SchemaGenerator) -> Schema;

/// One thing that can be asked.
pub(super) struct Operation<S> {
    method: &'static str,
    pub(super) path: &'static str,
    id: &'static str,
    summary: &'static str,
    pub(super) query: Option<SchemaOf>,
    pub(super) body: Option<SchemaOf>,
    answer: (u16, &'static str, Option<SchemaOf>),
    pub(super) handler: MethodRouter<S>,
}

impl<S> Operation<S> {
    pub(super) fn new(
        method: &'static str,
        path: &'static str,
        id: &'static str,
        summary: &'static str,
        handler: MethodRouter<S>,
    ) -> Self {
        Self {
            method,
            path,
            id,
            summary,
            query: None,
            body: None,
            answer: (200, "application/json", None),
            handler,
        }
    }

    /// Its query has these fields.
    pub(super) fn asks<T: JsonSchema>(self) -> Self {
        Self { query: Some(T::json_schema), ..self }
    }

    /// Its body is this.
    pub(super) fn takes<T: JsonSchema>(self) -> Self {
        Self { body: Some(SchemaGenerator::subschema_for::<T>), ..self }
    }

    /// Its body is a guest's file.
    pub(super) fn takes_guest_file(self) -> Self {
        Self { body: Some(guest_file), ..self }
    }

    /// It is answered so.
    pub(super) fn answers<T: JsonSchema>(self, status: u16) -> Self {
        Self { answer: (status, "application/json", Some(SchemaGenerator::subschema_for::<T>)), ..self }
    }

    /// It is answered by a stream of these.
    pub(super) fn streams<T: JsonSchema>(self, media: &'static str) -> Self {
        Self { answer: (200, media, Some(SchemaGenerator::subschema_for::<T>)), ..self }
    }

    /// It is answered by a text.
    pub(super) fn text(self, media: &'static str) -> Self {
        Self { answer: (200, media, None), ..self }
    }

    fn description(&self, schemas: &mut SchemaGenerator) -> Value {
        let names = self.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
        let mut parameters: Vec<Value> = names
            .map(|name| {
                let pattern = if name == "address" { ADDRESS } else { NAME };
                let schema = json!({ "type": "string", "pattern": pattern });
                json!({ "name": name, "in": "path", "required": true, "schema": schema })
            })
            .collect();
        if let Some(query) = self.query.map(|schema| schema(schemas)) {
            let fields = query.get("properties").and_then(Value::as_object).cloned().unwrap_or_default();
            parameters.extend(fields.into_iter().map(|(name, schema)| {
                let about = schema.get("description").cloned().unwrap_or_default();
                json!({ "name": name, "in": "query", "description": about, "schema": schema })
            }));
        }
        let (status, media, schema) = self.answer;
        let content = schema.map_or_else(|| json!({}), |schema| json!({ "schema": schema(schemas) }));
        let problem = schemas.subschema_for::<Problem>();
        let mut description = json!({
            "operationId": self.id,
            "summary": self.summary,
            "parameters": parameters,
            "responses": {
                status.to_string(): { "description": self.summary, "content": { media: content } },
                "default": {
                    "description": "Why it was not done",
                    "content": { "application/problem+json": { "schema": problem } },
                },
            },
        });
        if let Some(body) = self.body {
            description["requestBody"] =
                json!({ "content": { "application/json": { "schema": body(schemas) } } });
        }
        description
    }
}

/// What a guest's name is, as a regular expression of ECMA-262.
const NAME: &str = "^[A-Za-z0-9_][A-Za-z0-9_-]{0,63}$";
/// What a PCI address is.
const ADDRESS: &str = r"^([0-9A-Fa-f]{1,8}:)?[0-9A-Fa-f]{1,2}:[01]?[0-9A-Fa-f]\.[0-7]$";

/// A guest's file, as JSON: the keys of docs/guest-toml.md, which says what they mean.
fn guest_file(_: &mut SchemaGenerator) -> Schema {
    let object = |required: &[&str], properties: Value| json!({ "type": "object", "additionalProperties": false, "required": required, "properties": properties });
    let list = |items: Value| json!({ "type": "array", "items": items });
    let (text, flag) = (json!({ "type": "string" }), json!({ "type": "boolean" }));
    let number = |from: u32, to: u32| json!({ "type": "integer", "minimum": from, "maximum": to });
    let waivers = |may: &[Measure]| json!({ "type": "array", "items": { "enum": may }, "uniqueItems": true });
    let accelerator = json!({
        "device": text, "memory": text, "deadline": text, "time_slice": text, "poll": text, "window": text, "trust": text,
        "driver": text, "host_memory": text, "unconfined": waivers(&Measure::ALL),
    });
    let device = json!({
        "address": { "type": "string", "pattern": ADDRESS },
        "rom": text,
        "vf_token": text,
        "bars": { "type": "object", "propertyNames": { "pattern": "^[0-5]$" }, "additionalProperties": text },
    });
    let file = object(
        &["memory", "boot"],
        json!({
            "name": { "type": "string", "pattern": NAME },
            "vcpus": number(1, 255),
            "memory": text,
            "hugepages": { "enum": ["2M", "1G"] },
            "numa_nodes": { "type": "array", "items": number(0, 65535), "maxItems": 8, "uniqueItems": true },
            "boot": object(&["kernel"], json!({ "kernel": text, "initrd": text, "cmdline": text })),
            "devices": list(object(&["address"], device)),
            "peer_to_peer": flag,
            "hot_plug_slots": number(0, 16),
            "accelerators": list(object(&["device", "memory"], accelerator)),
            "vsock": object(&["cid"], json!({ "cid": number(3, u32::MAX - 1) })),
            "disks": list(object(&["path"], json!({ "path": text, "read_only": flag }))),
            "net": list(object(&["tap"], json!({ "tap": text, "mac": text, "vhost": flag }))),
            "unconfined": waivers(&GUEST_WAIVERS),
        }),
    );
    let mut file = Schema::try_from(file).unwrap_or_default();
    file.insert(
        "description".into(),
        "A guest's file (docs/guest-toml.md) as JSON. Paths are absolute; `name` may be left out.".into(),
    );
    file
}

/// The description of all of these.
pub(super) fn document<S>(operations: &[Operation<S>]) -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    let mut schemas = settings.into_generator();
    let mut paths = Map::new();
    for operation in operations {
        let description = operation.description(&mut schemas);
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        path[operation.method.to_ascii_lowercase()] = description;
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "vm-service",
            "version": "1",
            "description": "Guests, and the host's devices that they have. Within one version operations, fields and kinds of \
                            values are only added; readers ignore what they do not know.",
            "license": { "name": "Apache-2.0 OR MIT" },
        },
        "paths": paths,
        "components": { "schemas": schemas.take_definitions(true) },
    })
}
