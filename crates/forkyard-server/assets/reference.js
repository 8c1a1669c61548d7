// Draws the OpenAPI description that the server gives of itself. Everything is set as text: nothing of it is markup.
'use strict';

function el(tag, props, ...children) {
  const node = Object.assign(document.createElement(tag), props || {});
  for (const child of children) if (child) node.append(child);
  return node;
}

function typeOf(schema) {
  if (!schema) return '';
  if (schema.$ref) return schema.$ref.split('/').pop();
  if (schema.oneOf || schema.anyOf) return (schema.oneOf || schema.anyOf).map(typeOf).join(' | ');
  if (schema.enum) return schema.enum.map((v) => JSON.stringify(v)).join(' | ');
  const type = Array.isArray(schema.type) ? schema.type.join(' | ') : schema.type || 'any';
  return type.startsWith('array') ? typeOf(schema.items) + '[]' : type;
}

function rows(head, lines) {
  const table = el('table');
  table.append(el('tr', null, ...head.map((h) => el('th', { textContent: h }))));
  for (const line of lines) table.append(el('tr', null, ...line.map((c) => el('td', { textContent: c ?? '' }))));
  return table;
}

function operation(path, method, op) {
  const needs = (op.security || [])[0] || {};
  const scope = needs.token ? 'scope ' + needs.token[0] : 'public';
  const body = el('div', null, el('p', { textContent: op.description || '' }));
  if (op.parameters?.length) {
    body.append(el('h4', { textContent: 'Parameters' }),
      rows(['name', 'in', 'type', ''], op.parameters.map((p) => [p.name + (p.required ? ' *' : ''), p.in, typeOf(p.schema), p.description])));
  }
  for (const [kind, media] of Object.entries(op.requestBody?.content || {})) {
    body.append(el('h4', { textContent: 'Body (' + kind + ')' }), el('code', { textContent: typeOf(media.schema) }));
  }
  body.append(el('h4', { textContent: 'Answers' }), rows(['status', 'body', ''], Object.entries(op.responses).map(([status, r]) =>
    [status, Object.values(r.content || {}).map((m) => typeOf(m.schema)).join(', '), r.description])));
  const secret = needs.token ? ' -H "Authorization: Bearer $TOKEN"' : '';
  const verb = method === 'get' ? '' : ' -X ' + method.toUpperCase();
  const json = op.requestBody?.content?.['application/json'] ? " -H 'Content-Type: application/json' -d @body.json" : '';
  body.append(el('pre', { textContent: 'curl' + verb + secret + json + ' ' + location.origin + path }));
  return el('details', { id: op.operationId },
    el('summary', null, el('span', { className: 'method', textContent: method.toUpperCase() }),
      el('span', { className: 'path', textContent: path }), el('span', { textContent: op.summary || '' }),
      el('span', { className: 'scope', textContent: scope })), body);
}

fetch('/api/v1/openapi.json').then((r) => r.json()).then((api) => {
  document.getElementById('about').textContent = api.info.title + ' ' + api.info.version + '. ' + (api.info.description || '');
  const into = document.getElementById('operations');
  for (const tag of api.tags || []) {
    into.append(el('h2', { textContent: tag.name }), el('p', { textContent: tag.description || '' }));
    for (const [path, item] of Object.entries(api.paths))
      for (const [method, op] of Object.entries(item))
        if ((op.tags || [])[0] === tag.name) into.append(operation(path, method, op));
  }
  const schemas = document.getElementById('schemas');
  for (const [name, schema] of Object.entries(api.components?.schemas || {})) {
    const fields = Object.entries(schema.properties || {}).map(([k, v]) =>
      [k + ((schema.required || []).includes(k) ? ' *' : ''), typeOf(v), v.description]);
    schemas.append(el('details', { id: 'schema-' + name }, el('summary', null, el('span', { className: 'path', textContent: name })),
      el('div', null, el('p', { textContent: schema.description || '' }),
        fields.length ? rows(['field', 'type', ''], fields) : el('pre', { textContent: JSON.stringify(schema, null, 2) }))));
  }
});
