// OpenAI's own client for Node against a server, whose address is the argument. Run by test_foreign_clients.py.

import assert from 'node:assert';
import OpenAI from 'openai';
import { zodResponseFormat } from 'openai/helpers/zod';
import { z } from 'zod';

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: 'none', maxRetries: 0 });
const model = 'mini-infer';
const messages = [{ role: 'user', content: 'How is the weather?' }];
const parameters = {
  type: 'object',
  properties: { city: { enum: ['Paris', 'Oslo'] } },
  required: ['city'],
  additionalProperties: false,
};

const rain = ({ city }) => `rain in ${city}`;
const weather = { name: 'weather', description: 'Of a city', parameters };
const runner = client.chat.completions.runTools({
  model,
  messages,
  tools: [{ type: 'function', function: { ...weather, parse: JSON.parse, function: rain } }],
  tool_choice: { type: 'function', function: { name: 'weather' } },
});
assert.match(await runner.finalFunctionToolCallResult(), /^rain in (Paris|Oslo)$/);

const size = zodResponseFormat(z.object({ size: z.enum(['a', 'b']) }), 'size');
const { choices } = await client.chat.completions.parse({ model, messages, response_format: size });
assert(['a', 'b'].includes(choices[0].message.parsed.size));

const stream = client.chat.completions.stream({ model, messages, max_tokens: 8, guided_choice: ['It rains'] });
let deltas = '';
stream.on('content', (delta) => (deltas += delta));
assert.equal(await stream.finalContent(), 'It rains');
assert.equal(deltas, 'It rains');

const kinds = [];
const events = await client.responses.create({
  model,
  input: 'hi',
  stream: true,
  tools: [{ type: 'function', strict: true, ...weather }],
  tool_choice: 'required',
});
for await (const event of events) kinds.push(event.type);
assert.equal(kinds.at(-1), 'response.completed');
assert(kinds.includes('response.function_call_arguments.done'));

const long = client.chat.completions.create({ model, messages: [{ role: 'user', content: 'x'.repeat(9000) }] });
await assert.rejects(long, (error) => error.status === 400 && error.code === 'context_length_exceeded');
