// Package cloudapi is the HTTP API of virtual-cloud: its types and a small client. It
// imports only the standard library, so that drivers do not depend on anything else.
//
//	POST   /v1/instances                  create
//	GET    /v1/instances?name=&tag=k=v    list; several tags must all match
//	GET    /v1/instances/{id}             get
//	DELETE /v1/instances/{id}             delete
//	POST   /v1/instances/{id}/initialize  initialize
//	GET    /healthz                       200 while the cloud serves
//
// Calls for developing and testing drivers are below /v1/admin, with a client of their
// own ([Admin]):
//
//	GET    /v1/admin/knobs                how the cloud behaves
//	PATCH  /v1/admin/knobs                change knobs
//	POST   /v1/admin/release              release creates that a knob holds
//	POST   /v1/admin/tokens               replace the accepted API tokens
//	GET    /v1/admin/stats                figures
//	GET    /v1/admin/log?after=SEQ        what happened, as JSON lines
//
// Errors have a JSON body, see [Error].
package cloudapi
