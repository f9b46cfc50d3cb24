// Package cloudapi is the HTTP API of virtual-cloud: its types and a small
// client. It needs the standard library only, so that a driver that uses it
// carries nothing else.
//
//	POST   /v1/instances                  create
//	GET    /v1/instances?name=&tag=k=v    list; several tags must all match
//	GET    /v1/instances/{id}             get
//	DELETE /v1/instances/{id}             delete
//	POST   /v1/instances/{id}/initialize  initialize
//	GET    /healthz                       200 while the cloud serves
//
// What develops and tests drivers stands apart, below /v1/admin, with a client
// of its own ([Admin]):
//
//	GET    /v1/admin/knobs                how the cloud behaves
//	PATCH  /v1/admin/knobs                change that
//	POST   /v1/admin/release              let creates go that a knob holds
//	POST   /v1/admin/tokens               replace the accepted API tokens
//	GET    /v1/admin/stats                figures
//	GET    /v1/admin/log?after=SEQ        what happened, as JSON lines
//
// Errors have a JSON body, see [Error].
package cloudapi
